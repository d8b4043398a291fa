"""The method: prompts, tool calls, rewards, HRPO and GRPO advantages (arXiv 2601.07055)."""
