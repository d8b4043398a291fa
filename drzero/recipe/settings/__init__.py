"""Our own config keys: each is a dataclass field with its type, range, default and one line of help.

    schema_of("challenger")["retrieval.topk"]      # Key(name="retrieval.topk", default=3, low=1, high=100, …)

Only `register` imports Hydra.
"""
