"""Our own config keys: each is a dataclass field with its type, range, default and one line of help.

    schema_of("challenger")["retrieval.topk"]      # Key(name="retrieval.topk", default=3, low=1, high=100, …)
    drzero config retrieval                        # the same on the command line, and in docs/config.md

`schema` collects the fields of each stage. `register` gives their defaults to Hydra, and is the only module
here that imports Hydra. The files of `config/` set only values that differ from these defaults.
"""
