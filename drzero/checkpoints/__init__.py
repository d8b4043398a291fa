"""veRL's checkpoints between two stages.

`resume` chooses the one to start from, `export` merges one into a Transformers folder, `verify` compares the
two weight by weight, `weight_change` measures how far training moved the weights. No stages, no services.
"""
