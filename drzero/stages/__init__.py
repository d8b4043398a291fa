"""The stages: one function over one composed config each, and what they share.

Training (challenger and solver), synthesize, merge, evaluate, prepare-data and the demo; their services,
their watchdog and flow settings, summaries and result files. A stage knows nothing of the loop that runs it.
"""
