"""Check that an engine computes what Transformers computes. Knows neither configs nor services.

The engine is asked first, over HTTP, so its memory is free when Transformers loads the model.
"""
