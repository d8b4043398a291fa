"""The public address of `--action serve-model`: Modal's tunnel to the port in its container."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import modal

from drzero.launch.errors import LaunchError
from drzero.ops.bearer import PUBLIC_ADDRESS

_PORT = "port=8080"


def served_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of a model behind a tunnel. Raises LaunchError for a port that is not a number."""
    words = [_PORT, *overrides, "host=0.0.0.0", "background=false"]
    if not _port(words).isdecimal():
        raise LaunchError(f"port={_port(words)}: a tunnel leads to a numbered port: leave it out")
    return words


@contextmanager
def public_address(command: Sequence[str]) -> Iterator[None]:
    """The address while serve-model runs. Other stages have none."""
    if command[0] != "serve-model":
        yield
        return
    with (
        modal.forward(int(_port(command))) as tunnel,
        patch.dict(os.environ, {PUBLIC_ADDRESS: tunnel.url}),
    ):
        yield


def _port(words: Sequence[str]) -> str:
    return [word for word in words if word.startswith("port=")][-1].removeprefix("port=")
