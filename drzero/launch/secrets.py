"""Secrets: `.env` as Modal's dotenv secret, otherwise the named secrets that exist. None is required."""

import os
from pathlib import Path

import modal
from dotenv import dotenv_values

from drzero.launch.errors import LaunchError
from drzero.ops.bearer import MODEL_KEY

NAMED = {"wandb-secret": "WANDB_API_KEY", "huggingface-secret": "HF_TOKEN"}
_MEANING = {
    "wandb-secret": "metrics are logged offline, into the run's folder",
    "huggingface-secret": "only models that need no login can be downloaded",
}


def client_environment(root: Path) -> dict[str, str]:
    """`.env` in the checkout and, winning over it, the environment."""
    return {**{key: value or "" for key, value in dotenv_values(root / ".env").items()}, **os.environ}


def dotenv_secret(root: Path) -> modal.Secret:
    """The checkout's `.env`, or an empty secret: a container must define as many secrets."""
    return modal.Secret.from_dotenv(root) if (root / ".env").is_file() else modal.Secret.from_dict({})


def check_token(action: str, is_open: bool, root: Path) -> None:
    """Raise LaunchError for a model at a public address that anyone could ask, unless that is wanted."""
    has_token = bool(dotenv_values(root / ".env").get(MODEL_KEY))
    if action != "serve-model" or has_token != is_open:
        return
    if has_token:
        raise LaunchError(f"--open: requests need {MODEL_KEY} once it is in .env: leave one of the two out")
    raise LaunchError(
        f"{MODEL_KEY} is not in .env, and the model's address is public: put one there, which requests then "
        "need, or write --open to let anyone ask at your cost"
    )


def named_secrets(root: Path) -> tuple[str, ...]:
    """The named secrets that exist and that `.env` does not replace. Prints a line for each missing one."""
    already = dotenv_values(root / ".env")
    found = []
    for name, key in NAMED.items():
        if already.get(key):
            continue
        try:
            modal.Secret.from_name(name).hydrate()
        except modal.exception.NotFoundError:
            print(f"[launch] no secret {name} ({key}): {_MEANING[name]}")
        else:
            found.append(name)
    return tuple(found)
