"""The reference engine: batched generation with a plain Transformers model, and an OpenAI-compatible server.

It knows nothing of veRL, search or rewards. `verl_ext.rollout` connects it to veRL.
"""
