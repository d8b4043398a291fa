"""GPU and host memory, and periodic samples of what each component uses.

Measurements only. Estimates for a planned run are in `drzero.preflight`.
"""
