"""The reference engine: batched generation with a plain Transformers model.

Decoding, KV and prefix caches, sampling, weight updates, and a small OpenAI-compatible server. It knows
nothing of veRL, search or rewards; `verl_ext.rollout` connects it to veRL.
"""
