"""Environments to train and evaluate an agent in. The modules here are the interface and know no model."""
