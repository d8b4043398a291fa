"""Commands of `drzero` that are neither a stage nor the loop.

check-services, flow-test, diagnose, and those for models. They probe, download or report, and change no
results. What a stage needs as well belongs in `pipeline.stages` or below.
"""
