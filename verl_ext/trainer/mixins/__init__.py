"""One concern of the trainer per module: a mixin overrides hooks of veRL's `PPOTrainer` and calls the next.

`verl_ext.trainer.observed_trainer` puts them together. Nothing here knows how rewards become advantages.
"""
