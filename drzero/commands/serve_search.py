"""`drzero serve-search`: the retrieval service alone, until it is interrupted.

    drzero serve-search chroma.path=my/chromadb retrieval.port=8000

The same service, settings and checks as in a run (docs/retrieval.md). Once it answers, its address is
printed, and a line for another terminal that asks it something.
"""

import json
import shlex
import socket
import time
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from drzero.ops.console import say
from drzero.ops.services.services import ServiceGroup
from drzero.stages.services import check_and_resolve, retrieval_spec
from search.wire import TOKEN_VARIABLE, read_token

_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every one of this machine, and one of them to ask at."""


def run_serve_search(config: DictConfig) -> None:
    """Serve until interrupted; raises PreflightFailed before the start, ServiceDied if the service ends."""
    config = check_and_resolve(config, "serve_search")
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    # With nothing next to it, what the service logs is for the console.
    with ServiceGroup([replace(retrieval_spec(config), relays=True)]) as services:
        url = address(config.retrieval.host, config.retrieval.port)
        with_token = read_token() is not None
        asks = f"it asks for the token in {TOKEN_VARIABLE}" if with_token else "it asks for no token"
        say("serve-search", f"{url} answers, {asks}; {url}/docs describes it, Ctrl-C ends it")
        say(
            "serve-search",
            f"runs search it by retrieval.url={outside_address(config.retrieval)}, and you by:",
        )
        # Alone on its line, so that it can be copied.
        print(f"\n{curl_line(url, config.retrieval.topk, with_token=with_token)}\n", flush=True)
        while True:
            services.check()
            time.sleep(0.5)


def address(host: str, port: int) -> str:
    """Where a service that binds this host and port is asked from this machine."""
    host = _EVERY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def outside_address(retrieval: DictConfig) -> str:
    """Where runs ask a service: of one that binds every address of this machine, by the machine's name."""
    host = socket.gethostname() if retrieval.host in _EVERY else retrieval.host
    return address(host, retrieval.port)


def curl_line(url: str, topk: int, *, with_token: bool) -> str:
    """A shell's line that sends the service a query; the token stays in the environment."""
    body = json.dumps({"queries": ["what is this corpus about?"], "topk": topk})
    token = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if with_token else ""
    # No proxy of the environment stands between two programs of one machine.
    to = f"curl -s --noproxy '*' {url}/retrieve"
    return f"{to}{token} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
