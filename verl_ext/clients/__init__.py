"""Models behind HTTP servers, and the agents that play conversations and episodes with them.

Solver attempts, synthesis, evaluation and the preview use these. Prompts, parsing and rewards are in
`verl_ext.method`, veRL's own rollouts in `verl_ext.rollout`.
"""
