"""The method: prompts, tool calls, rewards, HRPO and GRPO advantages (arXiv 2601.07055).

Pure functions and data classes without veRL, Ray or network. The only file they read is the chat template.
"""
