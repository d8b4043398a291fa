"""Chooses demonstrations from runs that have asked and answered: the pairs that pass all gates.

A pair gives its challenger's conversation, and one right attempt that searched. Without a right attempt it
gives nothing, because nobody has confirmed its answer. Each one left out is listed with the reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from omegaconf import DictConfig

from data.gates import Gates
from data.pairs import Pair
from data.selection import Selection, select
from data.solver_rows import document_key, held_out_documents
from drzero.preflight.demonstrations import Source
from verl_ext.method.chat import opened_thinking
from verl_ext.method.demonstration import Example, encode, messages_of
from verl_ext.method.prompts import Message, challenger_messages, solver_messages
from verl_ext.method.search_calls import parse_tool_calls
from verl_ext.method.trajectory import Trajectory

ROLES = ("challenger", "solver")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class _About:
    role: str
    hop: int
    doc_id: str
    question: str | None
    answer: str | None
    source: str


@dataclass(frozen=True)
class Demonstration(_About):
    """A conversation of one role, ready to be trained on."""

    split: str  # train or held_out
    trajectory: dict[str, Any]
    example: Example

    def to_dict(self) -> dict[str, Any]:
        """A line of `demonstrations.jsonl`."""
        return {name: value for name, value in vars(self).items() if name != "example"}


@dataclass(frozen=True)
class LeftOut(_About):
    """A conversation that is none, and why: a line of `left_out.jsonl`."""

    reason: str


@dataclass(frozen=True)
class Chosen:
    """The demonstrations of both splits, all others, and the confirmed pairs of held-out documents."""

    demonstrations: list[Demonstration]
    left_out: list[LeftOut]
    held_out_pairs: list[tuple[Source, Pair]]

    def of(self, split: str) -> list[Demonstration]:
        """One split, in the order of its prompts."""
        return [one for one in self.demonstrations if one.split == split]

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """How many there are by split, role and hop count."""
        return {
            split: {
                role: dict(
                    sorted(Counter(str(one.hop) for one in self.of(split) if one.role == role).items())
                )
                for role in ROLES
            }
            for split in ("train", "held_out")
        }


def choose(config: DictConfig, sources: Sequence[Source], tokenizer: Any, gates: Gates) -> Chosen:
    """Choose from all sources together, so that no two of them ask the same."""
    rows, records, source_of = _together(sources)
    by_prompt: dict[int, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record["prompt_index"], []).append(record)
    selection = select(by_prompt, rows, gates)
    held_out = held_out_documents(
        selection.accepted, config.data.seed, int(config.held_out_share * len(selection.accepted))
    )
    found, left_out = list[Demonstration](), list(_refused(selection, source_of))
    by_key = {(record["prompt_index"], record["sample"]): record for record in records}
    held_out_pairs = list[tuple[Source, Pair]]()
    for pair in selection.accepted:
        split = "held_out" if document_key(pair) in held_out else "train"
        record, source = by_key[pair.prompt_index, pair.sample], source_of[pair.prompt_index]
        for role, outcome in _conversations(pair, record):
            about = (role, pair.hop, pair.doc_id, pair.question, pair.answer, source.name)
            learnt = outcome if isinstance(outcome, str) else _first(config, tokenizer, pair, role, outcome)
            if isinstance(learnt, str):
                left_out.append(LeftOut(*about, learnt))
            else:
                said, example = learnt
                found.append(Demonstration(*about, split, said.to_dict(), example))
            if split == "held_out" and role == "challenger" and not isinstance(outcome, str):
                held_out_pairs.append((source, pair))
    kept, surplus = balanced(found, config.data.seed)
    return Chosen(kept, [*left_out, *surplus], held_out_pairs)


def _together(sources: Sequence[Source]) -> tuple[list[Any], list[Any], dict[int, Source]]:
    """All rows and records, numbered through, and the source of each number."""
    rows, records, source_of, first = list[Any](), list[Any](), dict[int, Source](), 0
    for source in sources:
        for row in source.rows:
            number = first + row["extra_info"]["index"]
            rows.append({**row, "extra_info": {**row["extra_info"], "index": number}})
            source_of[number] = source
        records += [{**one, "prompt_index": first + one["prompt_index"]} for one in source.records]
        first = 1 + max(source_of, default=-1)
    return rows, records, source_of


def _refused(selection: Selection, source_of: Mapping[int, Source]) -> Iterator[LeftOut]:
    for rejection in selection.rejected:
        for sample in rejection.samples:
            about = (rejection.hop, rejection.doc_id, sample.question, sample.answer)
            source = source_of[rejection.prompt_index]
            yield LeftOut("challenger", *about, source.name, "; ".join(sample.reasons))


def _conversations(pair: Pair, record: Record) -> Iterator[tuple[str, list[Trajectory] | str]]:
    """Each role's conversations about a pair, the one to prefer first, or why there is none."""
    if "attempts" not in record:  # of synthesize, which makes none
        yield "challenger", [pair.trajectory]
        yield "solver", "attempts: the run made none"
        return
    right = [attempt for attempt in record["attempts"] if attempt["finished"] and attempt["right"]]
    if not right:
        tried = len(record["attempts"])
        for role in ROLES:
            yield role, f"attempts: none of {tried} gave the challenger's answer, so nobody confirms it"
        return
    yield "challenger", [pair.trajectory]
    searched = [attempt for attempt in right if attempt["searches"]]
    # The shortest is the one to imitate.
    searched.sort(key=lambda attempt: attempt["tokens_out"])
    found = [Trajectory.from_dict(attempt["trajectory"]) for attempt in searched]
    yield "solver", found or "attempts: the right ones did not search"


def _first(
    config: DictConfig, tokenizer: Any, pair: Pair, role: str, conversations: Sequence[Trajectory]
) -> tuple[Trajectory, Example] | str:
    """The first conversation that can be imitated, or why the last cannot."""
    fault = ""
    for said in conversations:
        example = render(config, tokenizer, pair, role, said)
        if isinstance(example, Example):
            return said, example
        fault = example
    return fault


def render(config: DictConfig, tokenizer: Any, pair: Pair, role: str, said: Trajectory) -> Example | str:
    """The conversation under the trained model's own prompt, or why it cannot be imitated."""
    if any(turn.truncated for turn in said.turns) or any(not call.answered for call in said.calls):
        return "conversation: a turn was cut off, or a call was not valid"
    if any(len(parse_tool_calls(turn.text)) != len(turn.calls) for turn in said.turns):
        return "conversation: a call is not written as JSON in <tool_call> tags"
    form, turns = config.prompts.form, config.rollout.max_turns
    prompt: list[Message] = (
        challenger_messages(pair.document, pair.hop, form, turns)
        if role == "challenger"
        else solver_messages(pair.question, form, turns)
    )
    example = encode(tokenizer, messages_of(prompt, said))
    return _fault(config, tokenizer, example, said) or example


def _fault(config: DictConfig, tokenizer: Any, example: Example, said: Trajectory) -> str | None:
    first = example.own_T.index(True)
    opened = opened_thinking(tokenizer, example.ids_T[:first])
    lengths = [len(tokenizer.encode(turn.text, add_special_tokens=False)) for turn in said.turns]
    special = set(tokenizer.all_special_ids)
    own = [token for token, is_own in zip(example.ids_T, example.own_T, strict=True) if is_own]
    if opened and not all(turn.text.startswith(opened.strip()) for turn in said.turns):
        return (
            f"conversation: the model's template opens a turn with {opened.strip()}, and the teacher's do not"
        )
    if sum(token in special for token in own) > len(said.turns):
        return "conversation: a turn has a special token of the model"
    for limit, tokens, key in (
        (config.data.max_prompt_length, first, "data.max_prompt_length"),
        (config.rollout.max_tokens_per_turn, max(lengths) + 1, "rollout.max_tokens_per_turn"),
        (config.data.max_response_length, len(example.ids_T) - first, "data.max_response_length"),
        (config.solver.max_context_tokens, len(example.ids_T), "solver.max_context_tokens"),
    ):
        if tokens > limit:
            return f"conversation: longer than {key}={limit}"
    return None


def balanced(found: Iterable[Demonstration], seed: int) -> tuple[list[Demonstration], list[LeftOut]]:
    """Cut each role's most frequent hop count to the second's. Mostly one hop would teach one search."""
    kept, surplus = list(found), list[LeftOut]()
    for role in ROLES:
        of_role = [one for one in kept if one.role == role and one.split == "train"]
        counts = Counter(one.hop for one in of_role).most_common(2)
        if len(counts) < 2:
            continue
        (hop, count), (_, most) = counts
        of_hop = [one for one in of_role if one.hop == hop]
        ordered = sorted(of_hop, key=lambda one: sha256(f"{seed}/{one.question}".encode()).digest())
        gone = {id(one) for one in ordered[: count - most]}
        reason = f"balance: more of {hop} hops than of any other count"
        surplus += [
            LeftOut(one.role, one.hop, one.doc_id, one.question, one.answer, one.source, reason)
            for one in kept
            if id(one) in gone
        ]
        kept = [one for one in kept if id(one) not in gone]
    return kept, surplus
