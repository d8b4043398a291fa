"""Run an agent before it trains: the contract, the runs, and their recording. Knows nothing of veRL."""
