"""Send one real question through a stage's services, or one prompt through its trainer.

    drzero check-services                                       the challenger's: retrieval and solver
    drzero check-services solver hardware=cpu
    drzero check-services challenger 'question=Who founded Orrin?' answer=Vell
    drzero check-services train --with-trainer env=wordle hardware=cpu    a run's memory, no update

The stage's own functions start the services. The question goes through search, solver attempts, tool calls,
answer and reward, with the agent, client and reward of a run. Each probe is printed with its time. The first
that fails ends the command with the component's name, its answer, and what to do. `--with-trainer` is in
`drzero.labs.check_trainer`.

Worth: finds a wrong port, token, model or index in a minute. Tests `drzero/stages/services.py` and
`verl_ext/clients`. Can go when preflight may start services.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from omegaconf import DictConfig

from drzero.labs.check_trainer import check_with_trainer, read_hops
from drzero.labs.trial import Step, prepared, print_steps, stage_services, watched
from drzero.ops.errors import RunFailed
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import AnySpec, ServiceGroup
from drzero.ops.text import did_you_mean
from drzero.recipe.compose import compose_stage, retrieval_url
from drzero.recipe.errors import CheckError
from drzero.stages.conversations import served_agent
from drzero.stages.models import completions_url, own_model
from drzero.stages.services import check_and_resolve
from search.client import SearchClient, SearchRequestError, SearchUnavailable
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.answers import exact_match
from verl_ext.method.challenger_reward import challenger_reward, extract_pair, has_integrity
from verl_ext.method.passages import format_passages
from verl_ext.method.search_calls import parse_tool_calls, render_tool_call
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory, Turn

STAGES = ("challenger", "solver")
WITH_TRAINER = "--with-trainer"


class ProbeFailed(RunFailed):
    """A probe failed although every service lives."""


@dataclass
class Probes:
    """A failed one is the last."""

    done: list[Step] = field(default_factory=list)

    def add(self, name: str, component: str, started: float, outcome: str, ok: bool = True) -> None:
        """Append a probe that has just ended."""
        self.done.append(Step(name, component, time.monotonic() - started, outcome, ok))

    def fail(self, name: str, component: str, started: float, answered: str, todo: str) -> ProbeFailed:
        """Append a failed probe and return the error to raise."""
        self.add(name, component, started, f"failed: {answered}", ok=False)
        return ProbeFailed(f"probe {name!r} failed at {component}: {answered}. {todo}")


@dataclass(frozen=True)
class ProbeQuestion:
    """The question to ask, its right answer, and the document it is about."""

    text: str
    answer: str
    document: str


def run_check_services(arguments: Sequence[str]) -> None:
    """Raises PreflightFailed, AlreadyRunning for a second check of the folder, ServiceDied or ProbeFailed."""
    if WITH_TRAINER in arguments:
        _run_with_trainer([word for word in arguments if word != WITH_TRAINER])
        return
    stage, words = split_stage(arguments)
    asked, overrides = split_question(words)
    # Its own folder, as the stage's may be in use.
    config = check_and_resolve(compose_stage(stage, ["run.name=check_services", *overrides]), stage)
    question = choose_question(config, **asked)
    with HeldLock(Path(config.run.dir) / "lock"):
        run_probes(config, stage_services(config, stage), question, stage)


def _run_with_trainer(arguments: Sequence[str]) -> None:
    stage, words = split_stage(arguments, (*STAGES, "train"))
    asked, overrides = split_question(words)
    if asked:
        raise CheckError(
            f"question= and answer= are for probes: {WITH_TRAINER} takes a row of the stage's own"
        )
    config = prepared(compose_stage(stage, ["run.name=check_trainer", *overrides]), stage)
    hops = list[Step]()
    try:
        hops = check_with_trainer(config, stage_services(config, stage))
    except RunFailed:
        hops = list(read_hops(Path(config.run.dir)))
        raise
    finally:
        if hops:
            print_steps(hops, "hop", f"{stage}: one prompt, no update")


def run_probes(config: DictConfig, specs: Sequence[AnySpec], question: ProbeQuestion, stage: str) -> None:
    """Run the probes with the services up, and print them, failed or not."""
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
            print_steps(probes.done, "probe", f"{stage}: {question.text}")


def split_stage(arguments: Sequence[str], stages: Collection[str] = STAGES) -> tuple[str, list[str]]:
    """The stage, which is the first word without `=`, or the challenger; and the other words."""
    names = [word for word in arguments if "=" not in word and not word.startswith(("+", "~"))]
    stage = names[0] if names else "challenger"
    if stage not in stages:
        known = ", ".join(stages)
        raise CheckError(
            f"check-services knows the services of {known}, not of {stage!r}{did_you_mean(stage, stages)}"
        )
    return stage, [word for word in arguments if word not in names[:1]]


def split_question(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own `question=` and `answer=`, with or without +, and the overrides."""
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
    """The given one, else from the stage's first row. A challenger's row has only a document."""
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
    """A question whose answer is the document's title, without the title in it."""
    title, _, text = document.partition("\n")
    if not text:
        title, text = " ".join(document.split()[:3]), " ".join(document.split()[3:])
    words = [word for word in text.split() if word.strip(".,") not in title.split()]
    asked = f"What is this about: {' '.join(words[:20])}?"
    if not has_integrity(asked, title):
        asked = "What is the document about?"
    return ProbeQuestion(asked, title, document)


async def probe_stage(config: DictConfig, stage: str, question: ProbeQuestion, probes: Probes) -> None:
    """Run all probes of a stage with its resolved config."""
    await probe_search(config, [question.text], "search", probes)
    if stage == "solver":  # its trainer serves the model, so no attempt can be made here
        await probe_tool_call(config, question, probes)
        probe_solver_reward(question, probes)
        return
    async with served_agent(SolverAgent, config, own_model(config, "solver")) as agent:
        attempts = await probe_attempts(agent, config, question, probes)
    probe_challenger_reward(question, attempts, probes)


async def probe_search(
    config: DictConfig, queries: list[str], name: str, probes: Probes, note: str = ""
) -> None:
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
    shown = format_passages(queries, results, retrieval.response_limit)
    outcome = f"{len(results[0])} passages, {len(shown)} characters as the model sees them{note}"
    probes.add(name, "retrieval", started, outcome)


async def probe_tool_call(config: DictConfig, question: ProbeQuestion, probes: Probes) -> None:
    """A search by a tool call written here in the model's format."""
    call = parse_tool_calls(render_tool_call([question.text]))[0]
    await probe_search(config, list(call.queries or ()), "tool call", probes, "; this command wrote the call")


async def probe_attempts(
    agent: SolverAgent, config: DictConfig, question: ProbeQuestion, probes: Probes
) -> list[SolverAttempt]:
    """The attempts of the reward: solver turns, tool calls, answers."""
    started, server = time.monotonic(), f"solver ({completions_url(config)})"
    todo = "Read solver.log; check solver.model_path, solver.max_context_tokens and the server's memory"
    try:
        attempts = await agent.attempts(question.text, config.solver.attempts)
    except SolverServerError as error:
        raise probes.fail("solver turn", server, started, str(error), todo) from error
    cut = [attempt for attempt in attempts if not attempt.finished]
    by_search = [attempt for attempt in cut if attempt.trajectory.failed_calls]
    if by_search:
        why = f"{len(by_search)} of {len(attempts)} attempts were cut short: {by_search[0].failure}"
        todo = "Read retrieval.log; see its load in /metrics"
        raise probes.fail("tool call", "retrieval", started, why, todo)
    if cut:
        why = f"{len(cut)} of {len(attempts)} attempts were cut short, the first because {cut[0].failure}"
        raise probes.fail("solver turn", server, started, why, todo)
    turns = sum(len(attempt.trajectory.turns) for attempt in attempts)
    tokens = sum(attempt.tokens_out for attempt in attempts)
    probes.add(
        "solver turn", "solver", started, f"{turns} turns of {len(attempts)} attempts, {tokens} tokens out"
    )
    calls = [call for attempt in attempts for call in attempt.trajectory.calls]
    if made := sum(call.answered for call in calls):
        probes.add("tool call", "retrieval", started, f"{made} of {len(calls)} were searches, in that time")
    else:
        await probe_tool_call(config, question, probes)
    given = [attempt.answer for attempt in attempts if attempt.answer is not None]
    listed = ", ".join(map(repr, given[:3])) or "none"
    longest = max(attempt.latency_s for attempt in attempts)
    outcome = f"{len(given)} of {len(attempts)} attempts gave one: {listed}"
    probes.done.append(Step("answer", "solver", longest, outcome))
    return attempts


def probe_challenger_reward(
    question: ProbeQuestion, attempts: Sequence[SolverAttempt], probes: Probes
) -> None:
    """The challenger's reward for this question."""
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
    if not score.valid:
        raise probes.fail("reward", "reward", started, str(score.reason_invalid), "See the probes before it")
    parts = f"difficulty {score.difficulty:.2f}, format {score.format:.2f}"
    probes.add("reward", "reward", started, f"{score.score:.3f}: {right} of {score.n} right, {parts}")


def probe_solver_reward(question: ProbeQuestion, probes: Probes) -> None:
    """The solver's reward for the right answer, which must be 1."""
    started = time.monotonic()
    score = solver_reward(Trajectory((Turn(f"<answer>{question.answer}</answer>"),)), [question.answer])
    outcome = f"{score.score:.3f} for the right answer"
    if score.score != 1.0:
        todo = "The answer is empty after normalization: rerun synthesize"
        raise probes.fail("reward", "reward", started, outcome, todo)
    probes.add("reward", "reward", started, outcome)
