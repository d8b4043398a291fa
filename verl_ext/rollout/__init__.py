"""veRL's rollout on our parts: agent loop, search tool, reference engine, CPU platform.

Adapters between veRL's classes and `verl_ext.method`, `verl_ext.engine` and `search.client`. Prompts, rewards
and decoding are in those, not here.
"""
