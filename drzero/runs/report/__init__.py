"""One page for a run: what ran, how it went, and every trajectory."""
