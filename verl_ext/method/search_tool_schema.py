"""The one tool every model is given, as an OpenAI function description.

Separate from the code that answers calls, so that prompts, the veRL tool and the solver agent use one schema.
"""

from typing import Any

SEARCH_TOOL_NAME = "search"
MAX_CALLS_PER_TURN = 5
"""Calls of one turn that are answered, in rollouts (`max_parallel_calls`) and in solver attempts alike."""
MAX_QUERIES_PER_CALL = 10
"""More would let one call flood the retrieval service, and more answers do not fit into one response."""
MAX_QUERY_CHARS = 1000
"""Longer than an embedder reads; the service refuses much longer queries."""

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
