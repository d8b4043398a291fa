"""The `search` tool for veRL 0.9.1. Its failure makes the sample invalid, a bad address ends the run."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from search.client import SearchClient, SearchRefused, SearchUnavailable
from verl_ext.method.passages import format_passages
from verl_ext.method.tool_calls import SEARCH_TOOL_SCHEMA
from verl_ext.telemetry import waiting

UNAVAILABLE = "Search is unavailable at the moment."


class SearchTool(BaseTool):
    """Answers queries with passages as the model sees them. All rollouts of a worker share one client."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SEARCH_TOOL_SCHEMA))
        self._client = SearchClient(
            config["retrieval_url"], topk=config["topk"], deadline_s=config["deadline_s"]
        )
        self._response_limit: int = config["response_limit"]

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer one valid call. The third item tells whether the service `failed` or `refused`, and why."""
        queries = parameters["query_list"]
        outcome: dict[str, Any] = {"failed": False, "refused": False, "error": None}
        try:
            with waiting("search", self._client.deadline_s):
                results = await self._client.retrieve(queries)
            text = format_passages(queries, results, self._response_limit)
        except SearchUnavailable as failure:
            text, outcome["failed"], outcome["error"] = UNAVAILABLE, True, str(failure)
        except SearchRefused as refusal:
            text, outcome["refused"], outcome["error"] = f"Error: {refusal.detail}", True, refusal.detail
        return ToolResponse(text=text), 0.0, outcome
