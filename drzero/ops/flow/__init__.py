"""The flow monitor: samples on their way through a run's queues.

`monitor` takes snapshots, `checks` compares two of them and names the queue at fault. The queues and the
sources of their counts are passed in by `drzero.stages.flow`.
"""
