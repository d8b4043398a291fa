"""The launcher: what `modal_train.py` does before, around and after a stage on Modal."""
