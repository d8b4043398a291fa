"""A trained agent as one folder: weights, tokenizer, settings, the index or its identity, and a model card.

`drzero.agent.write_bundle` makes it. Here it is checked, opened, pulled from the hub and pushed to it.
"""
