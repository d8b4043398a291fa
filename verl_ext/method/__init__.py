"""The method itself: prompts, tool calls, rewards, HRPO and GRPO advantages.

Pure functions and data classes: no veRL, no Ray, no network, no files but the chat template. Formulas cite
the paper (arXiv 2601.07055).
"""
