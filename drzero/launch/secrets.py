"""Secrets: from `.env` through Modal's dotenv secret, else the named secrets that exist.

`wandb-secret` contains WANDB_API_KEY and `huggingface-secret` HF_TOKEN. Neither is required: without a W&B
key runs log offline, without a Hugging Face token gated models cannot be downloaded; a line reports either.
"""

from collections.abc import Mapping
from pathlib import Path

import modal

NAMED = {"wandb-secret": "WANDB_API_KEY", "huggingface-secret": "HF_TOKEN"}
"""The key that each named secret is expected to contain."""
_MEANING = {
    "wandb-secret": "metrics are logged offline, into the run's folder",
    "huggingface-secret": "only models that need no login can be downloaded",
}


def dotenv_secret(root: Path) -> modal.Secret:
    """The `.env` next to modal_train.py; an empty secret if there is none.

    Always one object: a container imports the same file without a `.env` and must define as many secrets.
    """
    return modal.Secret.from_dotenv(root) if (root / ".env").is_file() else modal.Secret.from_dict({})


def named_secrets(already: Mapping[str, str | None]) -> tuple[tuple[str, ...], list[str]]:
    """Names of the secrets that exist and that `.env` does not replace, and notes on the missing ones."""
    found, notes = [], []
    for name, key in NAMED.items():
        if already.get(key):
            continue
        secret = modal.Secret.from_name(name)
        try:
            secret.hydrate()
        except modal.exception.NotFoundError:
            notes.append(f"no secret {name} ({key}): {_MEANING[name]}")
        else:
            found.append(name)
    return tuple(found), notes
