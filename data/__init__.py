"""Training data in parquet: the demo world, challenger prompts, benchmarks, synthesized pairs and their
gates.

Functions over rows and files, without models, services or config. Callers pass in an embedder as a function.
"""
