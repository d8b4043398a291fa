"""Whether an engine computes what Transformers computes: what both are asked, their answers, and the checks.

It knows neither configs nor services: `drzero.labs.compare_rollouts` starts the engine, asks, and
prints. The engine is asked first and over HTTP only, so that it can be gone, and its memory free, before
Transformers loads the model.
"""
