"""The demo policy: its LoRA adapter, the demonstrations it was trained on, and that training.

For policies that ship with the repository. Training by reward is in `drzero.stages`.
"""
