"""Stalls and deaths: notice one, collect evidence, name the cause, write the report.

It reads heartbeats, progress files, stacks, logs and samples, and leaves the run as it is, apart from the
configured stall action. The recipe's phases and limits are passed in by `drzero.stages.watch`.
"""
