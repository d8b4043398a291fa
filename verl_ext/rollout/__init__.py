"""Adapters for veRL's rollout: agent loops, search tool, reference engine, CPU platform."""
