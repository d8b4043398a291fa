"""Compare an inference engine with Transformers, token by token.

    drzero compare-rollouts model=demo-policy                          the engine of rollout=, started here
    drzero compare-rollouts model=qwen2.5-3b data=my/prompts.parquet n=64 rollout=sglang
    drzero compare-rollouts model=outputs/my_model endpoint=http://127.0.0.1:8080/v1
    drzero compare-rollouts model=demo-policy solver.model_path=my/model    the engine with other weights

Both get the same token ids. The engine continues each prompt greedily and by sampling, and draws single
tokens at a few places. Transformers reads the results. The checks cover greedy sequences, log-probabilities,
temperature, top-p, top-k, the stage's score, and a chat server's rendering of messages. worst.jsonl keeps the
worst cases. Exits with 1 if a check fails.

Worth: finds a wrong rope base, dtype or chat template that training would only show as slow learning. Tests
`verl_ext/engine` and `verl_ext/sglang`. Can go when veRL reports the same differences in a run.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from omegaconf import DictConfig

from drzero.labs.consistency.engine import Continued, Engine, Sampling, ServerPrompt, find_engine
from drzero.labs.consistency.prompts import Prompt, Wording, load_prompts
from drzero.labs.consistency.sampling import SETTINGS, SampledPlace, check_sampling, choose_places
from drzero.labs.consistency.verdict import Comparison, Tolerances
from drzero.labs.trial import watched
from drzero.ops.bearer import MODEL_KEY, bearer_headers
from drzero.ops.console import say
from drzero.ops.errors import RunFailed
from drzero.ops.files import atomic_write
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import ending
from drzero.ops.text import is_loopback
from drzero.preflight.inputs import question_fields
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.compose import write_resolved
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.models import base_of, served_name
from drzero.stages.services import check_and_resolve, solver_spec
from verl_ext.method.chat import turn_ends
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

WORST = "worst.jsonl"
_KEPT = 10  # cases a check in that file
_RENDERED = 8  # prompts the server renders itself


class Disagreement(RunFailed):
    """The engine and Transformers disagree."""


@dataclass(frozen=True)
class Answers:
    """The engine's answers."""

    greedy: list[Continued]
    sampled: list[Continued]
    places: list[SampledPlace]
    drawn: dict[str, list[list[int]]]  # by setting, the ids drawn at each place
    rendered: list[ServerPrompt | None]  # the server's rendering of the first prompts


def run_compare_rollouts(config: DictConfig) -> None:
    """Raises PreflightFailed, DataError, CheckError, ServiceDied, EngineUnfit, or Disagreement."""
    config = check_and_resolve(config, "compare_rollouts")
    tokenizer = load_chat_tokenizer(config.base_model, "base_model")
    wording = Wording(config.prompts.form, config.rollout.max_turns, question_fields(config))
    n = config.compare.n or (8 if config.machine.device == "cpu" else 64)
    prompts = load_prompts(config.compare.data, tokenizer, wording, n, config.data.seed)
    folder = Path(config.run.dir)
    events = EventLog(folder / "logs" / EVENTS_FILE)
    with HeldLock(folder / "lock"):
        write_resolved(config)
        events.add("start", "compare", f"starting: {len(prompts)} prompts")
        with ending(events, "compare", "the engine and Transformers agree"):
            _compare(config, prompts, tokenizer)


def _compare(config: DictConfig, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    worst = Path(config.run.dir) / WORST
    began = time.monotonic()
    answers = _answers(config, prompts, tokenizer)
    say("compare", f"the engine continued {len(prompts)} prompts in {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    checks = judge(config, prompts, answers, tokenizer)
    say("compare", f"Transformers read them in {time.monotonic() - began:.0f} s")
    cases = [json.dumps(case, ensure_ascii=False) for check in checks for case in check.cases[:_KEPT]]
    atomic_write(worst, "".join(f"{case}\n" for case in cases))
    _print(config, checks)
    if failed := [check for check in checks if check.passed is False]:
        advice = dict.fromkeys(check.advice for check in failed)
        raise Disagreement(
            f"the engine and Transformers disagree: {', '.join(check.name for check in failed)}. "
            f"Where to look: {'; '.join(advice)}. The worst cases: {worst}"
        )


def _answers(config: DictConfig, prompts: Sequence[Prompt], tokenizer: Any) -> Answers:
    if config.endpoint is None:
        specs, name = [solver_spec(config)], "solver"
        base = f"http://{config.solver.host}:{config.solver.port}/v1"
    else:
        specs, base = [], base_of(config.endpoint)
        name = served_name(base, config.endpoint_model, MODEL_KEY)
    found = list[Answers]()

    async def work() -> None:
        found.append(await ask(config, prompts, base.removesuffix("/v1"), name, sorted(turn_ends(tokenizer))))

    with ServiceGroup(specs) as services:
        asyncio.run(watched(work(), services))
    return found[0]


async def ask(
    config: DictConfig, prompts: Sequence[Prompt], address: str, name: str, ends: Sequence[int]
) -> Answers:
    """Ask the engine for everything to compare. Raises EngineUnfit."""
    compare, solver = config.compare, config.solver
    async with httpx.AsyncClient(
        base_url=address,
        timeout=httpx.Timeout(solver.deadline_s, connect=10.0),
        headers=bearer_headers(MODEL_KEY),
        trust_env=not is_loopback(address),
    ) as http:
        engine = await find_engine(http, name, ends, solver.concurrency)
        seeds = itertools.count(config.data.seed)

        async def continued(temperature: float) -> list[Continued]:
            how = Sampling(compare.tokens, temperature, top=2)
            return await asyncio.gather(*(engine.sample(p.ids, how, next(seeds)) for p in prompts))

        greedy, sampled = await continued(0.0), await continued(1.0)
        places = choose_places(sampled, compare.places)
        contexts = [prompts[at.prompt].ids + sampled[at.prompt].ids[: at.position] for at in places]
        drawn = {
            name: [await _draw(engine, ids, setting, compare.draws, seeds) for ids in contexts]
            for name, setting in SETTINGS.items()
        }
        rendering = (engine.prompt_of(p.messages, [SEARCH_TOOL_SCHEMA]) for p in prompts[:_RENDERED])
        return Answers(greedy, sampled, places, drawn, await asyncio.gather(*rendering))


async def _draw(
    engine: Engine, ids: Sequence[int], setting: Sampling, count: int, seeds: "itertools.count[int]"
) -> list[int]:
    made = await asyncio.gather(*(engine.sample(ids, setting, next(seeds)) for _ in range(count)))
    return [one.ids[0] for one in made]


def judge(
    config: DictConfig, prompts: Sequence[Prompt], answers: Answers, tokenizer: Any
) -> list[Comparison]:
    """Load Transformers' model and run every check. Raises CheckError if it does not load."""
    # Heavy, and not needed while the engine works.
    from drzero.labs.consistency.checks import (
        TransformersSide,
        check_greedy,
        check_log_probs,
        check_prompts,
        check_scores,
        read_sampled,
    )
    from verl_ext.engine.loading import ModelLoadError, load_model

    compare, limits, ends = config.compare, limits_of(config), sorted(turn_ends(tokenizer))
    try:
        model, _ = load_model(config.base_model, dtype=compare.dtype, device=config.machine.device)
    except ModelLoadError as error:
        raise CheckError(f"base_model: {error}") from error
    transformers = TransformersSide(model)
    greedy, parted = check_greedy(prompts, answers.greedy, transformers, tokenizer, limits)
    theirs, rows = read_sampled(transformers, prompts, answers.sampled, answers.places)

    def own_turn(index: int, position: int) -> list[int]:
        said = answers.greedy[index].ids[:position]
        room = compare.tokens - position
        return said + transformers.continue_greedily([*prompts[index].ids, *said], room, ends)

    return [
        check_prompts(prompts[: len(answers.rendered)], answers.rendered, tokenizer),
        greedy,
        check_log_probs(prompts, answers.sampled, theirs, tokenizer, limits, bool(greedy.passed)),
        *(check_sampling(name, drawn, rows, limits) for name, drawn in answers.drawn.items()),
        check_scores(prompts, answers.greedy, parted, own_turn, tokenizer, limits),
    ]


def limits_of(config: DictConfig) -> Tolerances:
    """The configured limits. Null ones follow from the dtypes."""
    compare = config.compare
    is_exact = config.solver.dtype == compare.dtype == "float32"

    def chosen(limit: float | None, exact: float, rounded: float) -> float:
        return limit if limit is not None else exact if is_exact else rounded

    return Tolerances(
        tie=chosen(compare.tie_nats, 0.001, 0.25),
        mean_gap=chosen(compare.mean_gap_nats, 0.0001, 0.02),
        largest_gap=chosen(compare.largest_gap_nats, 0.005, 1.0),
        differing_share=compare.differing_share,
        score_gap=compare.score_gap,
        least_p=compare.min_p_value,
    )


def _print(config: DictConfig, checks: Sequence[Comparison]) -> None:
    engine = config.endpoint or f"{config.solver.engine}, {config.solver.dtype}"
    title = f"{config.base_model}: {engine} against Transformers, {config.compare.dtype}"
    table = new_table(title, "check", "found", "passes", "verdict")
    for check in checks:
        style = "bold red" if check.passed is False else None
        table.add_row(check.name, check.found, check.limit, check.verdict, style=style)
    console().print(table)
    for case in next((check.cases[:1] for check in checks if check.name == "greedy sequences"), []):
        sides = [
            f"{side} " + " before ".join(f"{one['text']!r} ({one['log_prob']:.2f})" for one in case[side])
            for side in ("engine", "transformers")
        ]
        print(
            f"{case['prompt']}, token {case['position']}, after {case['after'][-40:]!r}: {'; '.join(sides)}"
        )
