"""The launcher: what `modal_train.py` does before, during and after a stage on Modal.

Actions, run files, machines, volumes, secrets, spend, and the supervised call in a container. At the user's
machine it imports modal, pyyaml, python-dotenv, `drzero.recipe.rates`, and `errors`, `files` and `versions`
of `ops`; the rest of the project is imported in the container. No recipe logic here.
"""
