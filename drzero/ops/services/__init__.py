"""Services next to a run: start, health checks, restart, stop."""
