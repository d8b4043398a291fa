"""What happens to veRL's checkpoints between two stages.

Choosing the checkpoint to resume from, merging one into a Transformers model folder, verifying that folder
weight by weight, and measuring how far training moved the weights. No stages and no services here.
"""
