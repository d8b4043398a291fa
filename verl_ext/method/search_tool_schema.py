"""The search tool as an OpenAI function description, shared by prompts, veRL's tool and the solver agent."""

from typing import Any

SEARCH_TOOL_NAME = "search"
MAX_CALLS_PER_TURN = 5  # in rollouts (`max_parallel_calls`) and solver attempts alike
MAX_QUERIES_PER_CALL = 10  # the results of more would not fit into a response
MAX_QUERY_CHARS = 1000  # more than an embedder reads. The service refuses much longer queries

SEARCH_TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": SEARCH_TOOL_NAME,
        "description": "Search the corpus. Returns the passages that fit each query best.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Search queries, each a short question or phrase that stands on its own.",
                }
            },
            "required": ["query_list"],
        },
    },
}
