"""The flow monitor: samples on their way through a run's queues."""
