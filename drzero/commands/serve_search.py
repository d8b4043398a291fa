"""`drzero serve-search`: the retrieval service alone, until you interrupt it.

    drzero serve-search chroma.path=my/chromadb retrieval.port=8000

It has the service, settings and checks of a run (docs/retrieval.md). Once it answers, it prints its address,
and a line to paste into another terminal for a first query.
"""

import json
import shlex
import socket
import time
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from drzero.ops.bearer import bearer_of
from drzero.ops.console import say
from drzero.ops.process.ports import EVERY_HOST, address
from drzero.ops.services.services import ServiceGroup
from drzero.stages.services import check_and_resolve, retrieval_spec
from search.wire import TOKEN_VARIABLE


def run_serve_search(config: DictConfig) -> None:
    """Serve until interrupted. Raises PreflightFailed before the start, ServiceDied if the service ends."""
    config = check_and_resolve(config, "serve_search")
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    # Nothing else runs, so the console shows the service's log.
    with ServiceGroup([replace(retrieval_spec(config), relays=True)]) as services:
        url = address(config.retrieval.host, config.retrieval.port)
        with_token = bearer_of(TOKEN_VARIABLE) is not None
        asks = f"it asks for the token in {TOKEN_VARIABLE}" if with_token else "it asks for no token"
        say("serve-search", f"{url} answers, {asks}; {url}/docs describes it, Ctrl-C ends it")
        say(
            "serve-search",
            f"runs search it by retrieval.url={outside_address(config.retrieval)}, and you by:",
        )
        # Alone on its line, to be copied.
        print(f"\n{curl_line(url, config.retrieval.topk, with_token=with_token)}\n", flush=True)
        while True:
            services.check()
            time.sleep(0.5)


def outside_address(retrieval: DictConfig) -> str:
    """The address for runs: the machine's name if the service binds every address."""
    host = socket.gethostname() if retrieval.host in EVERY_HOST else retrieval.host
    return address(host, retrieval.port)


def curl_line(url: str, topk: int, *, with_token: bool) -> str:
    """A shell line that sends the service a query. The token stays in the environment."""
    body = json.dumps({"queries": ["what is this corpus about?"], "topk": topk})
    token = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if with_token else ""
    # Programs on one machine need no proxy.
    to = f"curl -s --noproxy '*' {url}/retrieve"
    return f"{to}{token} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
