"""An episode: one task, played once by one model. An environment is a class of these, and a taskset.

Many run at once, so they must not share state. Methods run one after the other, a plain one in some thread,
an `async def` on the event loop, for at most `Taskset.timeout_s` seconds. An exception fails the rollout,
which is counted and not scored as zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn, tool_message
from environments.score import Score


class Episode(ABC):
    """The environment's side of one conversation."""

    max_calls_per_turn = 16  # further calls of a turn get no answer

    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """The messages the conversation begins with."""

    def tools(self) -> Sequence[ToolSchema]:
        """The tools the model may call. Asked before every turn, but the prompt shows the first answer."""
        return ()

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The messages after the model's turn, or None at the end of the episode.

        By default plain `tools` and `call` answer its calls, and a turn without calls ends the episode.
        """
        if not turn.calls:
            return None
        declared = {tool_name(tool): tool for tool in self.tools()}
        return [tool_message(_answer(self, call, declared)) for call in turn.calls[: self.max_calls_per_turn]]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer of a declared tool, to arguments its schema allows."""
        raise NotImplementedError(f"{type(self).__name__} declares tools: it needs a method call or respond")

    @abstractmethod
    def score(self) -> Score:
        """The score, at the episode's end or at a limit of turns or tokens."""

    def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release the episode's resources, however it ended."""


# A function, since a subclass may use the name of a method.
def _answer(episode: Episode, call: Call, declared: Mapping[str, ToolSchema]) -> str:
    if call.name is None or call.arguments is None or call.error is not None:
        return f"Error: {call.error}"
    wrong = badly_typed(declared[call.name], call.arguments)
    return episode.call(call.name, call.arguments) if wrong is None else f"Error: {wrong}"
