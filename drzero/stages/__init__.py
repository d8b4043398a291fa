"""The stages: one function over one composed config each, and the parts they share.

A stage knows nothing of the loop that runs it.
"""
