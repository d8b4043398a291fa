"""Our own settings: a dataclass field per config key, with type, range, default, and what it changes.

    schema_of("challenger")["retrieval.topk"]      # Key(name="retrieval.topk", default=3, low=1, high=100, …)
    drzero config retrieval                        # the same on the command line; docs/config.md has all keys

`schema` collects the fields of each stage; `register` stores them in Hydra's ConfigStore, as
`settings/common` and `settings/STAGE`. The files of `config/` begin with these and set only what differs.
veRL's own keys are not declared here. Only `register` imports Hydra and OmegaConf.
"""
