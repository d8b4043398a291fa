"""`drzero serve-agent`: the trained agent as a service, until you interrupt it.

    drzero serve-agent                                     # the last iteration's solver
    drzero serve-agent --compare iteration=0               # and the model before training, as a second model
    drzero serve-agent port=8091 host=0.0.0.0              # other machines need AGENT_TOKEN
    drzero serve-agent --stdio                             # MCP, for an assistant that starts it
    drzero serve-agent endpoint=https://api.example.com/v1 api=chat endpoint_model=a-model

It takes the settings and the index of the loop in paths.checkpoints, as `drzero ask` does. Open its address
in a browser for a page to ask on. OpenAI's client uses `/v1/chat/completions` (also streamed) and
`/v1/models` there, and MCP's `/mcp`, with the tools `search` and `ask`. `/health` and `/metrics` tell how it
is doing. With AGENT_TOKEN set, here or in .env, requests need it as their bearer token.
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing

import uvicorn
from omegaconf import DictConfig, open_dict

from drzero.agent.compose import beside, compose_agent
from drzero.agent.running import Agents, running
from drzero.agent.server.app import create_app
from drzero.agent.server.desk import opened_desk
from drzero.agent.server.stdio import serve_stdio
from drzero.loop.plan import take_option
from drzero.ops.bearer import AGENT_KEY, bearer_of
from drzero.ops.connections import server_config
from drzero.ops.console import say, set_verbose, stdout_apart
from drzero.ops.errors import UserError
from drzero.ops.process.ports import address, bind, reserve_port

_CHECK_EVERY_S = 0.5
_DRAIN_S = 5  # For open requests at the end


def run_serve_agent(arguments: Sequence[str]) -> None:
    """Serve until interrupted. Raises PortTaken, PreflightFailed or ServiceDied."""
    compared, words = take_option(arguments, "--compare")
    if "--stdio" in words:
        if compared is not None:
            raise UserError("--compare has no use with --stdio: MCP asks one agent. Leave it out")
        with stdout_apart() as out:
            return serve_stdio([word for word in words if word != "--stdio"], out)
    config = compose_agent("serve_agent", words)
    other = None if compared is None else compose_agent("serve_agent", beside(words, compared))
    set_verbose(config.verbose)
    with closing(_bind(config)) as listener, running(config, other, "serve_agent") as agents:
        asyncio.run(_serve(config, agents, listener))


def _bind(config: DictConfig) -> socket.socket:
    """Hold the port before the services start, which takes long."""
    try:
        listener = bind(reserve_port(config.port, config.host), config.host)
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing can listen at {config.host} ({error}): correct host= or port=") from error
    with open_dict(config):
        config.port = listener.getsockname()[1]
    return listener


async def _serve(config: DictConfig, agents: Agents, listener: socket.socket) -> None:
    async with opened_desk(agents) as (desk, search):
        app = create_app(
            desk,
            search,
            token=bearer_of(AGENT_KEY),
            states=lambda: _states(agents),
            lists_sources=config.sources_in_text,
        )
        options = {"server_header": False, "timeout_graceful_shutdown": _DRAIN_S}
        server = uvicorn.Server(server_config(app, **options))
        watching = asyncio.create_task(_watch(server, agents, config, desk.names))
        try:
            await server.serve(sockets=[listener])
            await asyncio.sleep(0)  # a Ctrl-C that uvicorn has passed on arrives at the next wait
        finally:
            watching.cancel()
        if watching.done():
            watching.result()


async def _watch(server: uvicorn.Server, agents: Agents, config: DictConfig, names: Sequence[str]) -> None:
    """Describe the server once it answers, and end it if a service ends."""
    try:
        while not server.started:
            await asyncio.sleep(0.05)
        _describe(config, names)
        while True:
            agents.services.check()
            await asyncio.sleep(_CHECK_EVERY_S)
    finally:
        server.should_exit = True


def _states(agents: Agents) -> Mapping[str, str]:
    services = agents.services
    own = {service.spec.name: service.state for service in services.services}
    return own | {service.spec.name: service.state for service in services.external}


def _describe(config: DictConfig, names: Sequence[str]) -> None:
    url = address(config.host, config.port)
    token = f"the bearer token in {AGENT_KEY}" if bearer_of(AGENT_KEY) else "no token, or any"
    models = " and ".join(map(repr, names))
    say(
        "serve-agent",
        f"{url} answers for {models}, in a browser too, with {token}; Ctrl-C ends it. For OpenAI's client:",
    )
    # Alone on its line, to be copied.
    print(f"\nexport OPENAI_BASE_URL={url}/v1\n", flush=True)
