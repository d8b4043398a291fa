"""A renderer for the library `verifiers` whose ids only grow. The library's fallback changes sampled ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import CustomRendererConfig, ParsedResponse, RenderedTokens
from renderers.base import ParsedToolCall, ToolCallParseStatus, extract_message_tool_names
from renderers.configs import BaseRendererConfig

from environments.call import FORMS, Call, parse_calls
from environments.turn_text import thinking, turn_parts
from environments.verifiers.harness import UNNAMED
from verl_ext.method.chat import next_turn_ids, plain_message, read_turn, render_prompt_ids, turn_ends


class ChatRendererConfig(BaseRendererConfig):
    """A renderer's settings, besides the tokenizer."""

    _internal_fields = frozenset({"chat_template", "call_form"})

    chat_template: str | None = None  # replaces the model's own
    call_form: str = "hermes"  # how the model writes tool calls, a key of `environments.call.FORMS`


def renderer_config(tokenizer: Any, call_form: str) -> CustomRendererConfig:
    """The library's configuration of this renderer."""
    return CustomRendererConfig(
        import_path=f"{ChatRenderer.__module__}:{ChatRenderer.__qualname__}",
        chat_template=tokenizer.chat_template,
        call_form=call_form,
    )


class ChatRenderer:
    """Messages to ids and back, by the model's chat template."""

    config_class = ChatRendererConfig
    supports_tools = True
    is_prefix_stable = False  # templates may change earlier turns, `bridge_to_next_turn` never does

    def __init__(self, tokenizer: Any, config: ChatRendererConfig) -> None:
        self._tokenizer, self._call_form = tokenizer, config.call_form
        if config.chat_template is not None:
            tokenizer.chat_template = config.chat_template
        self._stop = sorted(turn_ends(tokenizer))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """The ids of a whole conversation with the generation prompt, all counted as the last message's."""
        assert add_generation_prompt
        ids = render_prompt_ids(self._tokenizer, [plain_message(message) for message in messages], tools)
        return _rendered(ids, 0, messages)

    def render_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of `render`."""
        return self.render(messages, **options).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedTokens:
        """The ids so far, as sampled, and the messages that follow."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        following = next_turn_ids(
            self._tokenizer, previous_completion_ids, [plain_message(message) for message in new_messages]
        )
        return _rendered(before + following, len(before), new_messages)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """A turn as a message: its thinking, its text, and every tool call, valid or not."""
        text = read_turn(self._tokenizer, prompt_ids or (), token_ids)
        calls = parse_calls(text, tools or (), self._call_form)
        said = "".join(FORMS[self._call_form].read(part)[1] for _, part in turn_parts(text))
        thought, complete = thinking(text)
        return ParsedResponse(
            content=said.strip() if calls else said,
            reasoning_content=thought or None,
            tool_calls=[_parsed(call) for call in calls],
            reasoning_complete=complete,
        )

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn."""
        return list(self._stop)


def _rendered(ids: list[int], before: int, messages: Sequence[Mapping[str, Any]]) -> RenderedTokens:
    """The library already knows the first `before` ids."""
    return RenderedTokens(
        token_ids=ids,
        message_indices=[-1] * before + [len(messages) - 1] * (len(ids) - before),
        message_roles=[str(message.get("role") or "") for message in messages],
        message_tool_names=extract_message_tool_names([dict(message) for message in messages]),
    )


def _parsed(call: Call) -> ParsedToolCall:
    """The library would silently drop a call without a name."""
    good = call.valid and call.arguments is not None
    return ParsedToolCall(
        raw=call.raw,
        name=call.name or UNNAMED,
        arguments=dict(call.arguments) if call.arguments is not None else call.raw,
        status=ToolCallParseStatus.OK if good else ToolCallParseStatus.MALFORMED_STRUCTURE,
    )
