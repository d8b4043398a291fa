"""The `search` tool for veRL 0.9.1. Its failure makes the sample invalid, a bad address ends the run."""

from dataclasses import replace
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from search.client import SearchClient
from verl_ext.clients.search_agent import answered
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

UNAVAILABLE = "Search is unavailable at the moment."


class SearchTool(BaseTool):
    """Answers calls with passages as the model sees them. All rollouts of a worker share one client."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SEARCH_TOOL_SCHEMA))
        self._client = SearchClient(
            config["retrieval_url"], topk=config["topk"], deadline_s=config["deadline_s"]
        )
        self._response_limit: int = config["response_limit"]

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer the `call` of the parameters. The third item has it with its response."""
        call = await answered(parameters["call"], self._client, None, self._response_limit)
        call = replace(call, response=UNAVAILABLE) if call.failed else call
        return ToolResponse(text=call.response), 0.0, {"call": call}
