"""The smoke test on its machine: probes first, then a short challenger run, then what that run has proven.

On GPUs it is to touch whatever `hardware=8xh100` adds to one GPU; no recipe logic here.
"""
