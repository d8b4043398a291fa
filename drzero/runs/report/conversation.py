"""One trajectory as HTML: turn by turn, with thinking, calls and passages, its reward and the attempts."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from drzero.runs.report.calls import call_rows, every_row
from drzero.runs.report.reasons import explain
from drzero.runs.report.text import TEMPLATES, answer_pattern, cut, highlighted
from drzero.runs.report.trajectories import Trajectory
from environments.turn_text import turn_parts, without_tags
from verl_ext.method.passages import passage_of
from verl_ext.method.trajectory import SearchCall
from verl_ext.method.trajectory import Trajectory as Conversation

# A stretch holds no further tag of its kind: else each of many unclosed ones would be searched to the end.
# Atomic groups, because possessive groups fail in Python 3.11.2.
_TAGGED = re.compile(
    r"<(question|answer)>((?>(?:[^<]+|<(?!/?\1>))*))</\1>"
    r"|<tool_call>(?>(?:[^<]+|<(?!/?tool_call>))*)</tool_call>"
)


@dataclass(frozen=True)
class ShownCall:
    """A search call and its response."""

    call: SearchCall
    passages: list[tuple[Markup, bool]]  # lines, and whether each is a passage with the answer's words
    raw: str


@dataclass(frozen=True)
class ShownTurn:
    """A turn in pieces, with its calls."""

    name: str
    pieces: list[tuple[str, Markup]]
    """Its stretches, each after its kind: think, question, answer or text."""
    calls: list[ShownCall]
    truncated: bool
    observation: str | None = None


@dataclass(frozen=True)
class ShownRow:
    """One of several rows of an episode."""

    title: str
    opening: list[str]  # the messages that its conversation begins with
    turns: list[ShownTurn]


def render(trajectory: Trajectory) -> str:
    """The trajectory as HTML, everything in it escaped."""
    source = f"{trajectory.source}, line {trajectory.line}"
    answers = trajectory.targets or ((trajectory.answer,) if trajectory.answer else ())
    pattern = answer_pattern(answers[0] if answers else None)
    document = trajectory.document and highlighted(cut(trajectory.document, source), pattern)
    return TEMPLATES.get_template("trajectory.html.jinja").render(
        trajectory=trajectory,
        source=source,
        document=document,
        question=cut(trajectory.question or "", source),
        answer=cut(trajectory.answer or "", source),
        parts=explain(trajectory),
        tree=call_rows(trajectory.agent),
        begun_again=[fault["text"] for fault in trajectory.begun_again],
        rows=_rows(trajectory, pattern),
        turns=shown_turns(trajectory.conversation, pattern, source, trajectory.observations),
        attempts=[
            (attempt, shown_turns(attempt.conversation, pattern, source)) for attempt in trajectory.attempts
        ],
    )


def _rows(trajectory: Trajectory, pattern: re.Pattern[str] | None) -> list[ShownRow]:
    tree = {row.number: row for row in every_row(call_rows(trajectory.agent))}
    order = {number: place for place, number in enumerate(tree)}
    shown = []
    for row in sorted(trajectory.rows, key=lambda row: order.get(row.place[1] + 1, len(order))):
        source, number = f"{row.source}, line {row.line}", row.place[1] + 1
        turns = shown_turns(row.conversation, pattern, source, row.observations)
        title, opening = f"row {number}", [cut(said, source) for said in row.opening]
        if found := tree.get(number):
            title = f"row {number} {found.begins}"
            names = [f"call {number}, which another row trains" for number in found.before]
            names += [f"call {call.number}" for call in found.calls]
            turns = [replace(turn, name=name) for turn, name in zip(turns, names, strict=False)]
            # Of the calls before, only the last, whose answers lead to the row's own.
            turns = turns[max(len(found.before) - 1, 0) :]
            opening = [] if found.before else opening
        shown.append(ShownRow(title, opening, turns))
    return shown


def shown_turns(
    conversation: Conversation,
    pattern: re.Pattern[str] | None,
    source: str,
    observations: Sequence[str | None] = (),
) -> list[ShownTurn]:
    """The turns, with the answer's words highlighted and long texts cut."""
    said = observations or [None] * len(conversation.turns)
    return [
        ShownTurn(
            f"turn {number}",
            list(_pieces(cut(turn.text, source), pattern)),
            [_call(call, pattern, source) for call in turn.calls],
            turn.truncated,
            after and cut(after, source),
        )
        for number, (turn, after) in enumerate(zip(conversation.turns, said, strict=True), start=1)
    ]


def _pieces(text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, Markup]]:
    for thought, said in turn_parts(text):
        plain, *rest = _TAGGED.split(said)
        pieces = [("think", without_tags(thought)), ("text", plain)]
        for kind, tagged, after in zip(*(rest[place::3] for place in range(3)), strict=True):
            pieces += [(kind, tagged), ("text", after)]
        shown = ((kind, words.strip()) for kind, words in pieces if kind)  # None for a call
        yield from ((kind, highlighted(words, pattern)) for kind, words in shown if words)


def _call(call: SearchCall, pattern: re.Pattern[str] | None, source: str) -> ShownCall:
    response = cut(call.response or "", source)
    lines = [
        (highlighted(line, pattern), bool(pattern and pattern.search(passage_of(line))))
        for line in response.split("\n")
    ]
    return ShownCall(call, lines, cut(call.raw, source))
