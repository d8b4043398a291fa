"""Commands of `drzero` that read several rooms: preflight, status, compare, config, help, models, servers.

They change no results. Code that a stage needs as well belongs in `drzero.stages` or below.
"""
