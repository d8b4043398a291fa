"""The demo policy: its LoRA adapter, its demonstrations, and its supervised training."""
