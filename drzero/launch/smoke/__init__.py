"""The smoke test on its machine: probes, a short challenger run, and what that run has proven.

On GPUs it exercises everything `hardware=8xh100` adds to one GPU. No recipe logic here.
"""
