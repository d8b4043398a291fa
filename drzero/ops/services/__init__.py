"""Services next to a run: start, health checks, restart, stop.

Which services a stage needs, their commands and their probes are data from `drzero.stages.services`.
"""
