"""A run while it runs: `run_state` reads its files, `screen` draws them, `follow` shows both."""
