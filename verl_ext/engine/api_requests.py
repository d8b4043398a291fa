"""Request bodies. A field that the engine cannot honour is refused by name, unless it asks for nothing."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drzero.ops.openai_http import only, without_null
from environments.call import ToolSchema
from verl_ext.engine.sampling import MOST_TOP, SamplingParams


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")
    _present = model_validator(mode="before")(without_null)


class _StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(_Fields):
    """Fields of both kinds of request."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str | None = None
    metadata: dict[str, Any] | None = None
    frequency_penalty: Annotated[Any, only(0)] = 0
    presence_penalty: Annotated[Any, only(0)] = 0
    repetition_penalty: Annotated[Any, only(1)] = 1
    min_p: Annotated[Any, only(0)] = 0
    logit_bias: Annotated[Any, only({})] = {}
    store: Annotated[Any, only(False)] = False
    logprobs: Any = None

    @property
    def wants_log_probs(self) -> bool:
        """Whether to return the log-probs of the sampled tokens."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def other_tokens(self) -> int:
        """Number of most probable tokens to return per position."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs or 0

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list without empty strings, which end nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    def sampling(self, number: int, max_tokens: int) -> SamplingParams:
        """How to sample answer `number`, numbered from 0 and seeded apart. Raises ValueError."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            seed=None if self.seed is None else self.seed + number,
            top_log_probs=self.other_tokens,
        )


class CompletionRequest(SamplingFields):
    """`/v1/completions`: a text or token ids to continue."""

    prompt: str | list[int]
    max_tokens: int = 16
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    return_tokens_as_token_ids: bool = False
    echo: Annotated[Any, only(False)] = False


class _Function(_Fields):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool = False  # clients set it unasked. Calls are parsed, and nothing constrains them


class _Tool(_Fields):
    type: Literal["function"]
    function: _Function

    def schema_for_prompt(self) -> ToolSchema:
        """As chat templates take it."""
        shown = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": shown}


class _TextPart(_Fields):
    type: Literal["text"]
    text: str


class _CalledFunction(_Fields):
    name: str
    arguments: str | dict[str, Any]


class _ToolCall(_Fields):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class ChatMessage(_Fields):
    """A message, or this server's own answer as a client sends it back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[Any, only([])] = []

    def for_prompt(self) -> dict[str, Any]:
        """As chat templates take it, before `plain_message`."""
        shown = self.model_dump(exclude={"annotations"}, exclude_none=True)
        return shown | ({"role": "system"} if self.role == "developer" else {})


class ChatRequest(SamplingFields):
    """`/v1/chat/completions`: messages, and tools that the model may call."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[_Tool] = []
    tool_choice: Annotated[Any, only("auto", "none")] = "auto"
    parallel_tool_calls: Annotated[Any, only(True)] = True
    logprobs: bool = False
    top_logprobs: Annotated[Any, only(0)] = 0
    response_format: Annotated[Any, only({"type": "text"})] = {"type": "text"}
    modalities: Annotated[Any, only(["text"])] = ["text"]
    chat_template_kwargs: dict[str, Any] = {}
    return_prompt_token_ids: bool = False

    @property
    def most_tokens(self) -> int | None:
        """The limit on the answer, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_tools(self) -> list[ToolSchema]:
        """The tools shown in the prompt."""
        return [] if self.tool_choice == "none" else [tool.schema_for_prompt() for tool in self.tools]
