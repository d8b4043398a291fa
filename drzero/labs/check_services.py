"""`drzero check-services`: one real question through a stage's services, without the trainer or with it.

    drzero check-services                                       the challenger's: retrieval and solver
    drzero check-services solver hardware=cpu
    drzero check-services challenger 'question=Who founded Orrin?' answer=Vell
    drzero check-services solver --with-trainer hardware=cpu    as much memory as a run, and no update

The services are started by the functions that the stage uses, and stopped at the end. The question takes the
path of the reward: search, solver attempts with their turns and tool calls, answer, reward, with the agent,
client and reward of a run. Each of these probes is printed with its time and the bytes sent and received; the
first one that fails ends the command with the component's name, its answer, and what to do.

With `--with-trainer` the stage's own trainer takes one of its prompts through engine, services, reward, queue
and buffer (`drzero.labs.check_trainer`); this is also for the stage train, in any environment.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
from omegaconf import DictConfig

from drzero.labs.check_trainer import Hop, check_with_trainer, read_hops
from drzero.labs.trial import prepared, stage_services
from drzero.ops.errors import RunFailed
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import AnySpec, ServiceGroup
from drzero.ops.text import did_you_mean
from drzero.recipe.compose import compose_stage, retrieval_url
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.conversations import served_agent
from drzero.stages.models import own_model
from drzero.stages.services import check_and_resolve
from search.client import SearchClient, SearchRequestError, SearchUnavailable
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.answers import exact_match
from verl_ext.method.challenger_reward import challenger_reward, extract_pair, has_integrity
from verl_ext.method.passages import format_passages
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.tool_calls import parse_tool_calls, render_tool_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

_CHECK_EVERY_S = 0.5
_BLAME_S = 1.5  # a service whose end made a probe fail may take a moment to be seen as ended


class ProbeFailed(RunFailed):
    """A probe failed although every service lives; the message names the component and what to do."""


@dataclass(frozen=True)
class Probe:
    """One probe's result; sizes are bytes of JSON, 0 if nothing is sent or received."""

    name: str
    component: str
    seconds: float
    sent: int
    received: int
    outcome: str
    ok: bool = True


@dataclass
class Probes:
    """The probes so far; a failed one is the last."""

    done: list[Probe] = field(default_factory=list)

    def add(
        self, name: str, component: str, started: float, outcome: str, sent: int = 0, received: int = 0
    ) -> None:
        """Append one that has ended now."""
        seconds = time.monotonic() - started
        self.done.append(Probe(name, component, seconds, sent, received, outcome))

    def fail(self, name: str, component: str, started: float, answered: str, todo: str) -> ProbeFailed:
        """Append a failed probe; returns the error to raise."""
        self.add(name, component, started, f"failed: {answered}")
        self.done[-1] = replace(self.done[-1], ok=False)
        return ProbeFailed(f"probe {name!r} failed at {component}: {answered}. {todo}")


@dataclass(frozen=True)
class ProbeQuestion:
    """The question to ask, its right answer, and the document it is about."""

    text: str
    answer: str
    document: str


STAGES = ("challenger", "solver")
WITH_TRAINER = "--with-trainer"


def run_check_services(arguments: Sequence[str]) -> None:
    """Start a stage's services, send one question through them, print the probes, stop the services.

    Raises PreflightFailed before anything starts, AlreadyRunning during another check of the same folder,
    ServiceDied or ProbeFailed with the component at fault.
    """
    if WITH_TRAINER in arguments:
        run_with_trainer([word for word in arguments if word != WITH_TRAINER])
        return
    stage, words = split_stage(arguments)
    asked, overrides = split_question(words)
    # A folder of its own: the stage's may be in use.
    config = compose_stage(stage, ["run.name=check_services", *overrides])
    config = check_and_resolve(config, stage)
    question = choose_question(config, **asked)
    with HeldLock(Path(config.run.dir) / "lock"):
        run_probes(config, stage_services(config, stage), question, stage)


def run_with_trainer(arguments: Sequence[str]) -> None:
    """One prompt through a stage's trainer; prints each hop with its time, failed or not.

    Raises PreflightFailed before anything starts, AlreadyRunning, and what `check_with_trainer` raises.
    """
    stage, words = split_stage(arguments, (*STAGES, "train"))
    asked, overrides = split_question(words)
    if asked:
        raise CheckError(
            f"question= and answer= are for probes: {WITH_TRAINER} takes a row of the stage's own"
        )
    config = prepared(compose_stage(stage, ["run.name=check_trainer", *overrides]), stage)
    folder, hops = Path(config.run.dir), list[Hop]()
    try:
        hops = check_with_trainer(config, stage_services(config, stage))
    except RunFailed:
        hops = list(read_hops(folder))
        raise
    finally:
        if hops:
            print_hops(hops, f"{stage}: one prompt, no update")


def run_probes(config: DictConfig, specs: Sequence[AnySpec], question: ProbeQuestion, stage: str) -> None:
    """Start the services, run the probes, stop the services, and print the probes, failed or not."""
    probes = Probes()
    try:
        with ServiceGroup(specs) as services:
            try:
                asyncio.run(watched(probe_stage(config, stage, question, probes), services))
            except ProbeFailed as failed:
                culprit = probes.done[-1].component.partition(" ")[0]
                services.events.add("exit", "probes", str(failed), code=1, culprit=culprit)
                raise
            services.events.add("exit", "probes", "every probe was answered", code=0)
    finally:
        if probes.done:
            print_probes(probes, f"{stage}: {question.text}")


def split_stage(arguments: Sequence[str], stages: Collection[str] = STAGES) -> tuple[str, list[str]]:
    """The stage, the first word that is no override, the challenger by default; and the overrides."""
    names = [word for word in arguments if "=" not in word and not word.startswith(("+", "~"))]
    stage = names[0] if names else "challenger"
    overrides = [word for word in arguments if word not in names[:1]]
    if stage not in stages:
        hint = did_you_mean(stage, stages)
        known = ", ".join(stages)
        raise CheckError(f"check-services knows the services of {known}, not of {stage!r}{hint}")
    return stage, overrides


def split_question(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own `question=` and `answer=` (with or without +), and the overrides."""
    asked, overrides = dict[str, str](), []
    for word in words:
        name, _, value = word.partition("=")
        if name.lstrip("+") in ("question", "answer"):
            asked[name.lstrip("+")] = value.strip("\"'")
        else:
            overrides.append(word)
    return asked, overrides


def choose_question(
    config: DictConfig, question: str | None = None, answer: str | None = None
) -> ProbeQuestion:
    """The question and answer as given, else one from the first row of the stage's prompts.

    A solver's row contains a question; from a challenger's row, one is made from the document.
    """
    files = config.data.train_files
    path = Path(files if isinstance(files, str) else files[0])
    batches = pq.ParquetFile(path).iter_batches(1, columns=["extra_info", "reward_model"])
    row = next(batches).to_pylist()[0]  # preflight has checked that there is one
    document = str(row["extra_info"].get("document") or "")
    if (question is None) != (answer is None):
        raise CheckError("give both question=… and answer=…, or neither")
    if question is not None and answer is not None:
        return ProbeQuestion(question, answer, document or answer)
    asked = row["extra_info"].get("question")
    targets = (row["reward_model"].get("ground_truth") or {}).get("target")
    if asked and targets:
        return ProbeQuestion(str(asked), str(targets[0]), document)
    return question_about(document)


def question_about(document: str) -> ProbeQuestion:
    """A question whose answer is the document's title, and that does not contain the title."""
    title, _, text = document.partition("\n")
    if not text:
        title, text = " ".join(document.split()[:3]), " ".join(document.split()[3:])
    words = [word for word in text.split() if word.strip(".,") not in title.split()]
    asked = f"What is this about: {' '.join(words[:20])}?"
    if not has_integrity(asked, title):
        asked = "What is the document about?"
    return ProbeQuestion(asked, title, document)


async def watched(work: Awaitable[None], services: ServiceGroup) -> None:
    """Run `work`; raises ServiceDied as soon as a service ends, whatever `work` waits for."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_CHECK_EVERY_S)
            services.check()
        if task.exception() is not None:
            await asyncio.sleep(_BLAME_S)
            services.check()
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def probe_stage(config: DictConfig, stage: str, question: ProbeQuestion, probes: Probes) -> None:
    """Run all probes of a stage with its resolved config."""
    await probe_search(config, [question.text], "search", probes)
    if stage == "solver":
        # No model is served, so the tool call is written here, in a model's format.
        call = parse_tool_calls(render_tool_call([question.text]))[0]
        await probe_search(config, list(call.queries or ()), "tool call", probes)
        probe_solver_reward(question, probes)
        return
    async with served_agent(RecordingSolver, config, own_model(config, "solver")) as agent:
        attempts = await probe_attempts(agent, config, question, probes)
    probe_challenger_reward(question, attempts, probes)


async def probe_search(config: DictConfig, queries: list[str], name: str, probes: Probes) -> None:
    """One search through the run's own client."""
    retrieval = config.retrieval
    address = retrieval_url(retrieval)
    client = SearchClient(address, topk=retrieval.topk, deadline_s=retrieval.deadline_s)
    started = time.monotonic()
    try:
        results = await client.retrieve(queries)
    except (SearchUnavailable, SearchRequestError) as error:
        todo = "Read retrieval.log; check retrieval.port, and with `drzero serve-search` the index alone"
        if retrieval.url is not None:
            todo = "Check retrieval.url and RETRIEVAL_TOKEN; read the service's log where it runs"
        raise probes.fail(name, f"retrieval ({address})", started, str(error), todo) from error
    finally:
        await client.aclose()
    sent = _size({"queries": queries, "topk": retrieval.topk, "return_scores": False})
    shown = format_passages(queries, results, retrieval.response_limit)
    outcome = f"{len(results[0])} passages, {len(shown)} characters as the model sees them"
    probes.add(name, "retrieval", started, outcome, sent, _size({"result": results}))


class RecordingSolver(SolverAgent):
    """The reward's solver agent, which also records every turn and every tool call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `SolverAgent`."""
        super().__init__(*args, **kwargs)
        self.turns, self.tool_calls = Probes(), Probes()

    async def _post(self, request: dict[str, Any]) -> httpx.Response:
        started = time.monotonic()
        response = await super()._post(request)
        outcome, sizes = f"{len(request['prompt'])} tokens in", (_size(request), len(response.content))
        self.turns.add("solver turn", "solver", started, outcome, *sizes)
        return response

    async def _respond(self, call: SearchCall) -> SearchCall:
        started = time.monotonic()
        answered = await super()._respond(call)
        outcome = "answered" if answered.answered else f"not a search: {answered.error}"
        sizes = len(call.raw.encode()), len((answered.response or "").encode())
        self.tool_calls.add("tool call", "retrieval", started, outcome, *sizes)
        return answered


async def probe_attempts(
    agent: RecordingSolver, config: DictConfig, question: ProbeQuestion, probes: Probes
) -> list[SolverAttempt]:
    """The attempts of the reward: solver turns, tool calls, answers."""
    started, server = time.monotonic(), f"solver (http://{config.solver.host}:{config.solver.port})"
    todo = "Read solver.log; check solver.model_path, solver.max_context_tokens and the server's memory"
    try:
        attempts = await agent.attempts(question.text, config.solver.attempts)
    except SolverServerError as error:
        raise probes.fail("solver turn", server, started, str(error), todo) from error
    turns = sum(len(attempt.trajectory.turns) for attempt in attempts)
    if turns:
        tokens = sum(attempt.tokens_out for attempt in attempts)
        outcome = f"{turns} turns of {len(attempts)} attempts, {tokens} tokens out"
        probes.done.append(_combined(agent.turns.done, outcome))
    cut = [attempt for attempt in attempts if not attempt.finished]
    by_search = [attempt for attempt in cut if attempt.trajectory.failed_calls]
    if by_search:
        why = f"{len(by_search)} of {len(attempts)} attempts were cut short: {by_search[0].failure}"
        todo = "Read retrieval.log; see its load in /metrics"
        raise probes.fail("tool call", "retrieval", started, why, todo)
    if cut:
        why = f"{len(cut)} of {len(attempts)} attempts were cut short, the first because {cut[0].failure}"
        raise probes.fail("solver turn", server, started, why, todo)
    await probe_tool_call(agent, question, probes)
    given = [attempt.answer for attempt in attempts if attempt.answer is not None]
    listed = ", ".join(map(repr, given[:3])) or "none"
    outcome = f"{len(given)} of {len(attempts)} attempts gave one: {listed}"
    seconds = max(attempt.latency_s for attempt in attempts)
    probes.done.append(Probe("answer", "solver", seconds, 0, 0, outcome))
    return attempts


async def probe_tool_call(agent: RecordingSolver, question: ProbeQuestion, probes: Probes) -> None:
    """The attempts' tool calls, or one search of our own on the same path if the model made none."""
    started, calls = time.monotonic(), agent.tool_calls.done
    if made := sum(call.outcome == "answered" for call in calls):
        probes.done.append(_combined(calls, f"{made} of {len(calls)} were searches"))
        return
    call = await agent._respond(parse_tool_calls(render_tool_call([question.text]))[0])
    if call.failed:
        raise probes.fail("tool call", "retrieval", started, str(call.error), "Read retrieval.log")
    outcome = "answered; written here, as the solver made no search in its attempts"
    probes.done.append(replace(calls[-1], outcome=outcome))


def probe_challenger_reward(
    question: ProbeQuestion, attempts: Sequence[SolverAttempt], probes: Probes
) -> None:
    """The challenger's reward for this question, computed by the functions of `verl_ext.rewards`."""
    started = time.monotonic()
    text = f"<think>So.</think><question>{question.text}</question><answer>{question.answer}</answer>"
    trajectory = Trajectory((Turn(text),))
    asked, answer = extract_pair(trajectory)
    if not has_integrity(asked, answer):
        why = f"the question {asked!r} has no integrity with the answer {answer!r}"
        todo = "Give another with question=… and answer=…: the question must not contain the answer"
        raise probes.fail("reward", "reward", started, why, todo)
    right = sum(exact_match(attempt.answer, [question.answer]) for attempt in attempts)
    score = challenger_reward(trajectory, question.document, 1, n=len(attempts), k=right)
    parts = f"difficulty {score.difficulty:.2f}, format {score.format:.2f}"
    outcome = f"{score.score:.3f}: {right} of {score.n} right, {parts}"
    if not score.valid:
        raise probes.fail("reward", "reward", started, str(score.reason_invalid), "See the probes before it")
    probes.add("reward", "reward", started, outcome)


def probe_solver_reward(question: ProbeQuestion, probes: Probes) -> None:
    """The solver's reward for the right answer, which must be 1."""
    started = time.monotonic()
    trajectory = Trajectory((Turn(f"<answer>{question.answer}</answer>"),))
    score = solver_reward(trajectory, [question.answer])
    outcome = f"{score.score:.3f} for the right answer"
    if score.score != 1.0:
        todo = "Its answer normalises to nothing: rerun synthesize"
        raise probes.fail("reward", "reward", started, outcome, todo)
    probes.add("reward", "reward", started, outcome)


def print_probes(probes: Probes, title: str) -> None:
    """Print the probes as a table."""
    columns = ("probe", "component", ">seconds", ">sent", ">received", "outcome")
    table = new_table(title, *columns)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for probe in probes.done:
        sizes = (_bytes(probe.sent), _bytes(probe.received))
        style = None if probe.ok else "bold red"
        table.add_row(probe.name, probe.component, f"{probe.seconds:.2f}", *sizes, probe.outcome, style=style)
    console().print(table)


def print_hops(hops: Sequence[Hop], title: str) -> None:
    """Print the hops of `--with-trainer` as a table."""
    table = new_table(title, "hop", "component", ">seconds", "outcome")
    for hop in hops:
        style = None if hop.ok else "bold red"
        table.add_row(hop.name, hop.component, f"{hop.seconds:.2f}", hop.outcome, style=style)
    console().print(table)


def _combined(probes: Sequence[Probe], outcome: str) -> Probe:
    """Several probes of a kind as one: the mean time, the sum of bytes."""
    seconds = [probe.seconds for probe in probes]
    return replace(
        probes[0],
        seconds=sum(seconds) / len(seconds),
        sent=sum(probe.sent for probe in probes),
        received=sum(probe.received for probe in probes),
        outcome=f"{outcome}; longest {max(seconds):.2f} s" if len(probes) > 1 else outcome,
    )


def _size(body: Any) -> int:
    return len(json.dumps(body, ensure_ascii=False).encode())


def _bytes(count: int) -> str:
    return "–" if not count else f"{count} B" if count < 10_000 else f"{count / 1000:.1f} kB"
