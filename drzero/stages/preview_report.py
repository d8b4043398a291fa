"""The preview's report: rates by hop, refusals by gate, examples, cost, and gaps in the corpus."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from data.examples import Examples, evidence, of_selection
from data.pairs import trajectory_of
from data.selection import Selection, prompts_by_index
from drzero.recipe.tables import console, new_table
from drzero.stages.examples import gates_table, per_hop, print_examples, verdict
from drzero.stages.models import cost_line, costs, request_lines, usd

_MANY = 1 / 3  # a fault in more than this share of questions is reported as the corpus's
_LACKS = {
    "hops": "of {n} questions of several hops, {k} take fewer hops: the documents lead to too few others, or "
    "the model did not follow them",
    "duplicates": "of {n} questions, {k} repeat another word for word: the documents are alike",
    "near_duplicates": "of {n} questions, {k} ask the same as another: the documents are alike",
    "evidence": "of {n} questions, {k} have an answer that is in no passage read: the documents say too "
    "little to ask about, or the model makes things up",
}

Record = Mapping[str, Any]


def preview_report(
    config: DictConfig,
    rows: Sequence[Record],
    records: Sequence[Record],
    failures: Sequence[Record],
    selection: Selection,
    corpus: Mapping[str, Any],
) -> dict[str, Any]:
    """The report as JSON; `corpus` has facts about it, and lines to print."""
    by_index = {record["prompt_index"]: record for record in records}
    of_hop: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of_hop[str(record["hop"])].append(record["reward"])
    examples = of_selection(
        selection,
        prompts_by_index(rows),
        records,
        lambda pair: f"passed every gate; {verdict(by_index[pair.prompt_index])[1]}",
    )
    trajectories = [record["trajectory"] for record in records]
    trajectories += [attempt["trajectory"] for record in records for attempt in record["attempts"]]
    spent = costs([*records, *({"latency_s": 0.0} | dict(failure) for failure in failures)])
    return {
        **selection.counts,
        "corpus": dict(corpus),
        "per_hop": {hop: counts | _rates(of_hop[hop]) for hop, counts in per_hop(rows, selection).items()},
        "lacks": list(_lacks(corpus, selection)),
        "examples": examples.to_dict(),
        "failed": len(rows) - len(records),
        "cut_short": len(failures),
        "cost": spent | {"usd": usd(config, spent)},
        "turns_cut_off": sum(turn["truncated"] for one in trajectories for turn in one["turns"]),
    }


def _rates(rewards: Sequence[Record]) -> dict[str, Any]:
    """Of one hop count: proper questions, and their attempts."""
    tried = [reward for reward in rewards if reward["k"] is not None]
    attempts = sum(reward["n"] for reward in tried)
    return {
        "played": len(rewards),
        "questions": sum(reward["integrity"] for reward in rewards),
        "attempts": attempts,
        "pass_rate": sum(reward["k"] for reward in tried) / attempts if attempts else None,
        "sometimes": sum(0 < reward["k"] < reward["n"] for reward in tried),
        "reward": math.fsum(reward["score"] for reward in rewards) / len(rewards) if rewards else None,
    }


def question_rows(records: Sequence[Record], selection: Selection) -> list[dict[str, Any]]:
    """Each question with its fate and its evidence, in the order of the prompts."""
    accepted = {pair.prompt_index for pair in selection.accepted}
    refused = {one.prompt_index: one.samples[0].reasons for one in selection.rejected if one.samples}
    judged = ("question", "answer", "k", "n", "score", "format", "difficulty")
    return [
        {
            "prompt_index": record["prompt_index"],
            "accepted": record["prompt_index"] in accepted,
            "reasons": list(refused.get(record["prompt_index"], ())),
            **{name: record[name] for name in ("hop", "doc_id")},
            **{name: record["reward"][name] for name in judged},
            "evidence": evidence(record["reward"]["answer"], record["document"], trajectory_of(record)),
            "document": record["document"],
        }
        for record in sorted(records, key=lambda record: record["prompt_index"])
    ]


def _lacks(corpus: Record, selection: Selection) -> Iterator[str]:
    yield from corpus["lines"]
    several = sum(pair.hop > 1 for pair in selection.accepted)
    several += sum(one.hop > 1 for one in selection.rejected if one.samples)
    for gate, text in _LACKS.items():
        counts = selection.counts["gates"].get(gate, {})
        judged = several if gate == "hops" else counts.get("judged", 0)
        if judged and counts["refused"] > _MANY * judged:
            yield text.format(n=judged, k=counts["refused"])


def print_preview(report: Mapping[str, Any], name: str) -> None:
    """Print the report as tables and lines."""
    columns = (">prompts", ">questions", ">accepted", ">attempts right", ">some, not all", ">reward")
    table = new_table(f"{name}: {report['model']}", "hops", *columns)
    for hop, rates in report["per_hop"].items():
        right = "–" if rates["pass_rate"] is None else f"{rates['pass_rate']:.0%} of {rates['attempts']}"
        reward = "–" if rates["reward"] is None else f"{rates['reward']:.2f}"
        counts = (rates["prompts"], rates["questions"], rates["accepted"])
        table.add_row(hop, *map(str, counts), right, str(rates["sometimes"]), reward)
    console().print(table, gates_table(report["gates"]))
    print_examples(Examples.from_dict(report["examples"]), name)
    print("\nthe corpus:" if report["lacks"] else "\nthe corpus: no fault found in this sample")
    for line in report["lacks"]:
        console().print(f"  • {line}", soft_wrap=True)
    for line in cost_lines(report):
        console().print(line, soft_wrap=True)


def cost_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Tokens, price, and what went wrong."""
    yield cost_line(report["cost"], report["cost"]["usd"])
    if report["cut_short"]:
        yield f"a service cut {report['cut_short']} questions short; they were asked again, tokens included"
    if report["failed"]:
        yield f"{report['failed']} questions are missing and not counted: rerun to ask them"
    if report["turns_cut_off"]:
        yield f"{report['turns_cut_off']} turns were cut off at solver.max_tokens_per_turn"
    yield from request_lines(report["endpoint"]) if report.get("endpoint") else ()
    yield f"{report['accepted']} of {report['prompts']} prompts gave a question that passes every gate"
