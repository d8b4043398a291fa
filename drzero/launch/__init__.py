"""The launcher: what `modal_train.py` does before, during and after a stage on Modal. No recipe logic.

On the user's machine it imports only modal, pyyaml, python-dotenv and light modules of ours.
"""
