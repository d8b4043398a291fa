"""The smoke test on its machine: probes, a short challenger run, and what that run has proven."""
