"""The rows of an episode: each call that no later one extends ends a row, with all that came before it.

Every sampled token is trained once: where two rows begin alike, the first of them has the mask.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from drzero.players.gateway.session import AgentSession, ModelCall
from environments.conversation import Conversation, Turn
from verl_ext.episodes import Played
from verl_ext.method.chat import read_turn


def played_rows(session: AgentSession) -> list[Played]:
    """The rows in the order in which their last calls were made. Empty without a call."""
    trained: set[int] = set()
    rows = []
    for path in _paths(session.calls):
        rows.append(_row(session, path, trained))
        trained.update(call.number for call in path)
    return rows


def call_tree(session: AgentSession, rows: Sequence[Played]) -> list[dict[str, Any]]:
    """Each call with the one that it extends, the row that trains it, and how it began that row."""
    trained_in = {call: row for row, played in enumerate(rows) for call in played.extra["agent"]["places"]}
    return [
        {
            "extends": call.extends,
            "row": trained_in[call.number],
            "tokens": len(call.sampled.ids),
            "began": _began(session.calls, call),
        }
        for call in session.calls
    ]


def _began(calls: Sequence[ModelCall], call: ModelCall) -> dict[str, Any] | None:
    """How a new conversation began: the earlier call that it is most like, and where they part."""
    if call.extends is not None or not call.number:
        return None
    own = call.asked
    shared, nearest = max((_shared(one, call), one.number) for one in calls[: call.number])
    told = calls[nearest].asked
    if all(message["role"] == "system" for message in own.messages[:shared]):
        return {"how": "new"}
    if shared == len(told.messages) and own.tools != told.tools:
        return {"how": "tools", "call": nearest}
    if shared == len(told.messages) == len(own.messages):
        return {"how": "again", "call": nearest}
    return {"how": "edited", "call": nearest, "message": shared}


def _shared(earlier: ModelCall, later: ModelCall) -> int:
    """How many messages both begin with."""
    pairs = zip(earlier.asked.messages, later.asked.messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _paths(calls: Sequence[ModelCall]) -> Iterator[list[ModelCall]]:
    extended = {call.extends for call in calls}
    for last in calls:
        if last.number in extended:
            continue
        path = [last]
        while (number := path[0].extends) is not None:
            path.insert(0, calls[number])
        yield path


def _row(session: AgentSession, path: Sequence[ModelCall], trained: set[int]) -> Played:
    first, last = path[0], path[-1]
    start = len(first.prompt_ids)
    ids = last.known[start:]
    mask, log_probs = [0] * len(ids), [0.0] * len(ids)
    for call in path:
        place = slice(*_place(call, start))
        mask[place] = [int(call.number not in trained)] * len(call.sampled.ids)
        if call.sampled.log_probs is not None:
            log_probs[place] = call.sampled.log_probs
    new = [call for call in path if call.number not in trained]
    return Played(
        prompt_ids=first.prompt_ids,
        response_ids=ids,
        response_mask=mask,
        log_probs=None if any(call.sampled.log_probs is None for call in path) else log_probs,
        conversation=_conversation(session, path),
        score=None,
        ended="tokens" if session.out_of_room else "over",
        token_drift=_drift(path),
        tokens_in=sum(len(call.prompt_ids) for call in new),
        tokens_out=sum(len(call.sampled.ids) for call in new),
        extra={"agent": {"places": {call.number: _place(call, start) for call in new}}},
    )


def _place(call: ModelCall, start: int) -> tuple[int, int]:
    return len(call.prompt_ids) - start, len(call.known) - start


def _drift(path: Sequence[ModelCall]) -> int:
    """1 if a call does not begin with the ids of the one that it extends."""
    grown = (after.prompt_ids[: len(before.known)] == before.known for before, after in pairwise(path))
    return int(not all(grown))


def _conversation(session: AgentSession, path: Sequence[ModelCall]) -> Conversation:
    turns = []
    for call, after in zip(path, [*path[1:], None], strict=True):
        text = read_turn(session.model.tokenizer, call.prompt_ids, call.sampled.ids)
        answers = after.asked.messages[len(call.asked.messages) + 1 :] if after else ()
        turns.append(Turn(text, call.answer.calls, call.sampled.truncated, tuple(answers)))
    return Conversation(path[0].asked.messages, tuple(turns))
