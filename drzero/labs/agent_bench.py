"""Run an agent of your own against a served model, before it trains.

    drzero agent-bench my_agent.py:answer                             one task, every model call shown
    drzero agent-bench my_agent.py:answer serve=true model=smollm2-135m       its model served for the runs
    drzero agent-bench my_agent.py:answer mode=sample tasks=questions.jsonl n=16
    drzero agent-bench my_agent.py:answer mode=concurrent tasks=questions.jsonl batch_size=64 group_size=8
    drzero agent-bench wordle model=wordle-policy mode=concurrent     one of ours, by an environment's name
    drzero agent-bench train env=wordle mode=rollout batches=2        veRL's agent loop, in a stage's trainer

An agent is a function, a class or a command that returns rewards (`environments.agent.contract`). endpoint=
names the model's server, e.g. `drzero serve-model`. A proxy on loopback records each call. Printed are
latencies, calls, tokens, failures by cause, the line that blocked the event loop, and connections left open.
failures.jsonl keeps the failed runs. Any fault exits with 1.
mode=single runs in this process, so a debugger works: `python -m pdb -m drzero.cli agent-bench …`.

mode=rollout is for challenger, solver and train (`drzero.labs.agent_rollout`). Its other words are the
stage's; endpoint=, tasks= and n= of the bench do not apply.

Worth: shows leaks, pauses and failing rewards that appear only with many runs at once. Tests
`verl_ext/rollout` and the user's code. Can go when veRL's agent loops report the same.
"""

import asyncio
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig

from drzero.labs.agents.builtin import environment_agent
from drzero.labs.agents.proxy import ModelCall, Recorder, readable
from drzero.labs.agents.report import failed_share, faults, print_runs, record, unexplained, watched
from drzero.labs.agents.runs import NO_KEY, AgentRun, Bench, Plan, play
from drzero.ops.bearer import MODEL_KEY, bearer_of
from drzero.ops.console import say, set_verbose
from drzero.ops.errors import RunFailed
from drzero.ops.files import write_jsonl
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.process.ports import address
from drzero.ops.records import EVENTS_FILE
from drzero.ops.services.services import AnySpec, ServiceGroup
from drzero.ops.supervisor import ending
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.compose import compose_stage, resolve, write_resolved
from drzero.recipe.environment import load_taskset, rows_of
from drzero.recipe.errors import CheckError
from drzero.stages.models import base_of, model_name, served_name, served_names
from drzero.stages.services import add_call_form, check, choose_ports, search_spec, solver_spec
from environments.agent.contract import Agent, RewardRule
from environments.agent.load import EXAMPLE, is_class, load_agent, load_items
from environments.registry import shown as short

_NAME = "agent-bench"
FAILURES = "failures.jsonl"
BASE_URL = "OPENAI_BASE_URL"
_USUAL = "http://127.0.0.1:8080/v1"  # the default of serve-model
STAGES = ("challenger", "solver", "train")  # for mode=rollout
_OF_ROLLOUT = ("run_mode=", "batches=", "reward_range=")  # the others go to the stage


class AgentFaulty(RunFailed):
    """The agent is not ready to train."""


def run_agent_bench(arguments: Sequence[str]) -> None:
    """Raises CheckError or PreflightFailed before the first run, and AgentFaulty for any fault."""
    overrides = agent_bench_overrides(arguments)
    name = overrides[0].removeprefix("agent=")
    if name in STAGES:
        _bench_stage(name, overrides)
        return
    config = compose_stage("agent_bench", overrides)
    set_verbose(config.verbose)
    if config.run_mode == "rollout":
        yours = f"train {'agent' if is_class(name) else 'env'}={name}"
        raise CheckError(f"mode=rollout runs a stage's trainer ({', '.join(STAGES)}): write `{yours}`")
    _bench_agent(config)


def agent_bench_overrides(arguments: Sequence[str]) -> list[str]:
    """One word names the agent. A stage has its own mode=: only mode=rollout is the command's."""
    plain = [word for word in arguments if "=" not in word and word[:1] != "~"]
    keys = [word for word in arguments if word.startswith("agent=")]
    named = plain if plain and plain[0] in STAGES else plain + keys  # a stage's agent= is its own
    if len(named) != 1:
        raise CheckError(
            "name one agent: path.py:function, module:function, a class, an environment, or a stage"
        )
    name, words = named[0].removeprefix("agent="), [word for word in arguments if word not in named]
    if name in STAGES:
        return [f"agent={name}", *("run_mode=rollout" if word == "mode=rollout" else word for word in words)]
    return [f"agent={name}", *([] if is_class(name) else [f"env={name}"]), *words]


def _bench_stage(stage: str, overrides: Sequence[str]) -> None:
    from drzero.labs.agent_rollout import run_rollouts  # loads torch, which an agent's runs do not need

    named, *words = overrides
    own = [word for word in words if word.startswith(_OF_ROLLOUT)]
    bench = compose_stage("agent_bench", [named, *own])
    if bench.run_mode != "rollout":
        raise CheckError(f"{stage} is a stage: only mode=rollout runs its trainer")
    done = run_rollouts(stage, [word for word in words if word not in own], bench.batches, _rule(bench))
    failed = [run for run in done.runs if run.failure is not None]
    kept = _keep(failed, done.folder)
    found = [failed_share(done.runs)] if failed else []
    if done.ended:
        found.append(f"the trainer ended early: {done.ended}")
    with _ending(done.folder):
        print_runs(done.runs, done.seconds, done.figures, done.title)
        _conclude(found, kept)


def _bench_agent(config: DictConfig) -> None:
    if config.serve:
        check(config, "agent_bench")
        add_call_form(config, config.environment.call_form)
    if config.serve or not is_class(config.agent):  # an environment may search
        choose_ports(config)
    config = resolve(config)
    base = _address(config)
    name = model_name(config.base_model) if config.serve else served_name_of(config, base)
    folder = Path(config.run.dir)
    size = config.group_size if config.run_mode == "concurrent" else 1
    items_said = "1 item" if _size(config) == 1 else f"{_size(config)} items"
    with _agent_and_items(config, name) as (agent, items), HeldLock(folder / "lock"):
        write_resolved(config)
        shown = f"{short(agent.name)}, {config.run_mode}: {items_said}{f' × {size}' if size > 1 else ''}"
        EventLog(folder / "logs" / EVENTS_FILE).add("start", _NAME, f"starting: {shown}")
        with _ending(folder):
            bench = run_bench(config, agent, items, base, name)
            kept = _keep(bench.failed, folder)
            print_runs(bench.runs, bench.seconds, watched(bench), shown)
            limit_s = None if config.run_mode == "single" else config.max_pause_s
            if reason := unexplained(bench, limit_s):
                say(_NAME, reason, "warning")
            _conclude(list(faults(bench, limit_s)), kept)


def _address(config: DictConfig) -> str:
    if config.serve:
        return f"{address(config.solver.host, config.solver.port)}/v1"
    return base_of(config.endpoint or os.environ.get(BASE_URL) or _USUAL)


def _ending(folder: Path) -> AbstractContextManager[None]:
    return ending(EventLog(folder / "logs" / EVENTS_FILE), _NAME, "no fault was seen")


def run_bench(
    config: DictConfig, agent: Agent, items: Sequence[Any], base_url: str, model: str = ""
) -> Bench:
    """Run a resolved config in this thread."""
    plan = Plan(
        group_size=config.group_size if config.run_mode == "concurrent" else 1,
        at_once=config.run_mode == "concurrent",
        deadline_s=config.deadline_s,
        reward=_rule(config),
        api_key=bearer_of(MODEL_KEY) or NO_KEY,
        model=model,
        search_url=config.retrieval.url,
    )
    order = [0] if config.run_mode == "single" else choose(len(items), _size(config), config.data.seed)
    shows = _show_call if config.run_mode == "single" else lambda call: None
    # An agent may read the environment, and may change any of it.
    with Recorder(base_url, shows) as recorder, patch.dict(os.environ, {MODEL_KEY: plan.api_key}):
        os.environ[BASE_URL] = recorder.url()
        bench = asyncio.run(play(agent, [items[number] for number in order], plan, recorder))
    for run in bench.runs:
        run.item = order[run.number // plan.group_size]
    return bench


def _rule(config: DictConfig) -> RewardRule:
    if config.reward_range is not None and len(config.reward_range) != 2:
        raise CheckError(f"reward_range={list(config.reward_range)}: write [least,greatest]")
    return RewardRule(*(config.reward_range or ()))


def served_name_of(config: DictConfig, base: str) -> str:
    """Raises PreflightFailed if the endpoint does not answer."""
    if is_class(config.agent):
        return str(config.endpoint_model or [*served_names(base, MODEL_KEY), ""][0])
    return served_name(base, config.endpoint_model, MODEL_KEY)


@contextmanager
def _agent_and_items(config: DictConfig, model: str) -> Iterator[tuple[Agent, list[Any]]]:
    _rule(config)  # refuse a bad one before anything starts
    specs: list[AnySpec] = [solver_spec(config, "model", model)] if config.serve else []
    if is_class(config.agent):
        agent = load_agent(config.agent, dict(config.agent_options))
        items = load_items(Path(config.tasks)) if config.tasks else [EXAMPLE]
    else:
        taskset = load_taskset(config)
        tokenizer = load_chat_tokenizer(config.base_model, "base_model", searches=taskset.needs_retrieval)
        agent = environment_agent(config, taskset, tokenizer, model)
        rows = rows_of(taskset, "eval", _size(config), config.data.seed)
        items = [{"id": row.id, "data": dict(row.data)} for row in rows]
        if taskset.needs_retrieval:
            specs.append(search_spec(config))
    with ServiceGroup(specs):
        yield agent, items


def _size(config: DictConfig) -> int:
    return {"single": 1, "sample": config.n, "concurrent": config.batch_size}[config.run_mode]


def choose(items: int, n: int, seed: int) -> list[int]:
    """The numbers of `n` items, drawn by a seed, and repeated if there are fewer."""
    order = random.Random(seed).sample(range(items), items)
    return [order[number % items] for number in range(n)]


def _show_call(call: ModelCall) -> None:
    tokens = "?" if call.tokens_out is None else f"{call.tokens_in} + {call.tokens_out}"
    say("call", f"{call.path}: {call.status or 'no answer'} in {call.seconds:.2f} s, {tokens} tokens")
    for mark, body in (("", call.request), ("→ ", readable(call.answer.encode()))):
        shown = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        print(f"{mark}{_without_key(shown)}", flush=True)


def _without_key(text: str) -> str:
    """Some servers repeat a wrong key."""
    key = os.environ.get(MODEL_KEY) or NO_KEY
    return text if key == NO_KEY else text.replace(key, "***")


def _keep(failed: Sequence[AgentRun], folder: Path) -> Path | None:
    (folder / FAILURES).unlink(missing_ok=True)
    if not failed:
        return None
    # Parquet may give items any type.
    lines = (json.dumps(record(run), default=str) for run in failed)
    write_jsonl(folder / FAILURES, [json.loads(_without_key(line)) for line in lines])
    return folder / FAILURES


def _conclude(found: Sequence[str], failures: Path | None) -> None:
    if not found:
        return
    kept = [f"the failed runs with their calls: {failures}"] if failures else []
    raise AgentFaulty("\n  ".join(["the agent is not ready to train:", *found, *kept]))
