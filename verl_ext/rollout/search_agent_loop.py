"""The `search_agent` loop: veRL's tool agent with our limits and records (veRL 0.9.1).

Each turn has a token limit, or the first could use up the response before a search has run. Rewards read
`extra_fields["trajectory"]`, where failed searches are failed. veRL only shows the exception to the model.
"""

import time
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from drzero.ops.telemetry import waiting
from verl_ext.method.chat import call_form, read_turn, turn_ends, turn_text
from verl_ext.method.search_calls import SEARCH_TOOL_NAME, SEARCH_TOOL_SCHEMA, parse_tool_calls
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn, token_drift
from verl_ext.rollout.turn_builder import NO_FAMILY, TurnBuilder

PARSER_NAME = "search_call"
"""veRL's parser drops a malformed call and ends the rollout. Ours answers it with an error."""


@ToolParser.register(PARSER_NAME)
class SearchCallParser(ToolParser):
    """Every call in the form of the model's template, valid or not, with its raw text as the arguments."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Content and calls of one turn."""
        text = turn_text(self.tokenizer, responses_ids)
        return text, [_as_verl(call) for call in parse_tool_calls(text, call_form(self.tokenizer))]


class SearchAgentLoop(ToolAgentLoop):
    """One challenger or solver rollout with the search tool."""

    def __init__(self, *args: Any, max_tokens_per_turn: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | NO_FAMILY)
        self.tokenizer: Any = self.tokenizer  # veRL annotates it with the factory class
        self.continuous_token_builder = TurnBuilder(
            self.tokenizer, chat_template_kwargs=self.apply_chat_template_kwargs
        )
        self._ends, self._form = turn_ends(self.tokenizer), call_form(self.tokenizer)
        self.max_tokens_per_turn = max_tokens_per_turn
        # veRL's schema class drops the item type, but solver attempts must have the same ids.
        self.tool_schemas = [SEARCH_TOOL_SCHEMA]

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Run the conversation, then attach its trajectory and token drift."""
        began = time.monotonic()
        with waiting("rollout"):
            output = await super().run(sampling_params, priority, **kwargs)
        fields = output.extra_fields
        fields["rollout_s"] = time.monotonic() - began
        fields["trajectory"] = Trajectory(tuple(fields.pop("turns"))).to_dict()
        fields["token_drift"] = token_drift(output, fields.pop("sampled"))
        return output

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        room = self.response_length - len(agent_data.response_mask)
        capped = {**sampling_params, "max_tokens": min(self.max_tokens_per_turn, room)}
        capped["stop_token_ids"] = sorted(self._ends)
        input_ids = list(agent_data.prompt_ids)
        with waiting("generation"):
            state = await super()._handle_generating_state(agent_data, capped, ignore_termination)
        turn_ids = list(agent_data.response_ids)
        if not turn_ids:  # not the model's mistake, because an engine always samples at least one id
            raise RuntimeError(
                "the rollout engine returned no token: aborted, or no room left in max_model_len"
            )
        text = read_turn(self.tokenizer, input_ids, turn_ids)
        truncated = len(turn_ids) >= capped["max_tokens"] and turn_ids[-1] not in self._ends
        turn = Turn(text, tuple(parse_tool_calls(text, self._form)), truncated)
        agent_data.extra_fields.setdefault("turns", []).append(turn)
        agent_data.extra_fields.setdefault("sampled", []).append((input_ids, turn_ids))
        if state is AgentState.PROCESSING_TOOLS:  # veRL's parser cannot know what the prompt ended with
            agent_data.tool_calls = [_as_verl(call) for call in turn.calls]
            state = state if turn.calls else AgentState.TERMINATED
        return state

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        turns: list[Turn] = agent_data.extra_fields["turns"]
        open_calls = [call.raw if call.response is None else None for call in turns[-1].calls]
        index = open_calls.index(tool_call.arguments)
        call = turns[-1].calls[index]
        # Calls of one turn run concurrently, so an empty response marks this one as taken before the wait.
        _record(turns, index, replace(call, response=""))
        tool = self.tools[SEARCH_TOOL_NAME]
        create_kwargs = tools_kwargs.get(SEARCH_TOOL_NAME, {}).get("create_kwargs", {})
        instance_id, _ = await tool.create(create_kwargs=create_kwargs)
        try:
            response, _, outcome = await tool.execute(instance_id, {"call": call}, agent_data=agent_data)
        finally:
            await tool.release(instance_id)
        _record(turns, index, outcome["call"])
        return response, 0.0, {}


def _as_verl(call: SearchCall) -> FunctionCall:
    return FunctionCall(name=SEARCH_TOOL_NAME, arguments=call.raw)


def _record(turns: list[Turn], index: int, call: SearchCall) -> None:
    calls = turns[-1].calls
    turns[-1] = replace(turns[-1], calls=(*calls[:index], call, *calls[index + 1 :]))
