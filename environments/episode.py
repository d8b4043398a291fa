"""An episode: one task, played by one model once. An environment is a class of these and a taskset.

Every rollout gets an episode of its own; no state may be shared with another one, which runs at the same
time. Its methods are called one after the other, never two at once, each in some thread or, if it is an
`async def`, on the event loop; each has `Taskset.timeout_s` seconds. What they raise spoils the rollout: it
is counted as a failure and is no zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn, tool_message
from environments.score import Score


class Episode(ABC):
    """One conversation with the environment's side of it."""

    max_calls_per_turn = 16
    """Calls of one turn that are answered."""

    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """What the conversation begins with."""

    def tools(self) -> Sequence[ToolSchema]:
        """The tools that the model may call; none by default.

        Asked again for each turn. The prompt shows those of the first: a message must tell of any that come
        later.
        """
        return ()

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The messages that follow the model's turn; None when the episode is over.

        By default the turn's calls are answered by `call`, those that are not as their tool is declared by
        what is wrong with them (`tools` and `call` are plain functions then); no call ends the episode.
        """
        if not turn.calls:
            return None
        declared = {tool_name(tool): tool for tool in self.tools()}
        return [tool_message(_answer(self, call, declared)) for call in turn.calls[: self.max_calls_per_turn]]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a declared tool answers; the arguments are a JSON object that its schema allows."""
        raise NotImplementedError(f"{type(self).__name__} declares tools: it needs a method call or respond")

    @abstractmethod
    def score(self) -> Score:
        """What the episode is worth, once it is over or has reached a limit of turns or tokens."""

    def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Give back what the episode holds; called however it ends."""


# No method, whose name a subclass may have for something of its own.
def _answer(episode: Episode, call: Call, declared: Mapping[str, ToolSchema]) -> str:
    """What a call is answered with."""
    if call.name is None or call.arguments is None or call.error is not None:
        return f"Error: {call.error}"
    wrong = badly_typed(declared[call.name], call.arguments)
    return episode.call(call.name, call.arguments) if wrong is None else f"Error: {wrong}"
