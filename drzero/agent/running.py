"""The agent with its services: the search service, the model's server, and one or two sides to ask."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from omegaconf import DictConfig, open_dict

from drzero.agent.answer import Answer, Source, answer_of, sources_of
from drzero.agent.bundle.opening import check_index
from drzero.agent.earlier import Exchange, with_earlier
from drzero.ops.process.isolated import in_child
from drzero.ops.process.ports import reserve_port
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.compose import resolve, retrieval_url
from drzero.stages.conversations import served_agent
from drzero.stages.models import StageModel, greet, model_name, stage_model
from drzero.stages.services import check, check_and_resolve, search_spec, solver_spec
from search.index_info import ask_index
from verl_ext.clients.solver_agent import SolverAgent

Progress = Callable[[Sequence[str], Sequence[Source] | None], None]
"""Called with a call's queries before its search (None), and after it with what was found."""


@dataclass(frozen=True)
class Asker:
    """One side, in a running event loop: a model that searches."""

    solver: SolverAgent
    model: StageModel
    name: str = ""  # in requests
    iteration: int | None = None  # of the loop that trained it; None for a model behind an endpoint

    async def ask(
        self, question: str, earlier: Sequence[Exchange] = (), progress: Progress | None = None
    ) -> Answer:
        """Answer one question. Raises SolverServerError or SearchRequestError for a wrong configuration."""
        found: list[Source] = []

        def heard(queries: Sequence[str], results: list[list[dict[str, str]]] | None) -> None:
            new = None if results is None else list(sources_of(queries, results))
            found.extend(new or ())
            if progress:
                progress(queries, new)

        asked = with_earlier(question, earlier, self.solver.prompt_form)
        attempt = await self.solver.attempt(asked, heard=heard)
        return answer_of(question, attempt, found)


@dataclass(frozen=True)
class Agents:
    """The agent, and the one to compare with if there is one, behind running services."""

    sides: Sequence[tuple[DictConfig, StageModel]]
    services: ServiceGroup
    index: str  # its fingerprint

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[list[Asker]]:
        """The sides for the running event loop."""
        async with AsyncExitStack() as stack:
            askers: list[Asker] = []
            for config, model in self.sides:
                if model.endpoint:
                    stack.push_async_callback(model.endpoint.aclose)
                solver = await stack.enter_async_context(served_agent(SolverAgent, config, model))
                name = model.name if config.endpoint else model_name(model.shown)
                is_taken = any(asker.name == name for asker in askers)
                iteration = None if config.endpoint else config.iteration
                askers.append(Asker(solver, model, f"{name}-compared" if is_taken else name, iteration))
            yield askers

    async def ask(
        self, question: str, earlier: Sequence[Exchange] = (), progress: Progress | None = None
    ) -> list[Answer]:
        """Ask every side at once. Only the first one's progress is told."""
        async with self.opened() as (first, *others):
            asked = [first.ask(question, earlier, progress), *(one.ask(question, earlier) for one in others)]
            return list(await asyncio.gather(*asked))


@contextmanager
def running(config: DictConfig, other: DictConfig | None = None, stage: str = "ask") -> Iterator[Agents]:
    """Check the configs and start the services. Raises PreflightFailed, PortTaken or ServiceDied."""
    configs = [check_and_resolve(config, stage)]
    if other is not None:
        configs.append(_beside(configs[0], other, stage))
    in_child(check_index, configs[0], [one.bundle for one in configs])
    named = list(zip(configs, ("solver", "compared"), strict=False))
    sides = [(one, stage_model(one, name)) for one, name in named]
    for one, model in sides:
        greet(one, model)
    served = [solver_spec(one, name) for one, name in named if one.endpoint is None]
    with ServiceGroup([search_spec(configs[0]), *served]) as services:
        index = ask_index(retrieval_url(configs[0].retrieval)).fingerprint
        yield Agents(sides, services, index)


def _beside(first: DictConfig, other: DictConfig, stage: str) -> DictConfig:
    """The second side: the first one's search service, and its own server."""
    check(other, stage)
    with open_dict(other):
        for key in ("url", "host", "port"):
            other.retrieval[key] = first.retrieval[key]
        other.solver.port = reserve_port(None, other.solver.host)
    return resolve(other)
