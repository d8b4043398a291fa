"""The demo's search agent as a user would bring it: with LangGraph, and with Anthropic's messages.

Each plays a task {"messages", "answer"} with the run's search service, and returns the same rewards.
"""

from typing import Any

from environments.agent.contract import Endpoint
from search.client import SearchClient
from verl_ext.method.passages import format_passages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory, Turn

TURNS, TOPK, CHARACTERS = 4, 2, 1024  # as config/model/demo-policy.yaml
_FUNCTION = SEARCH_TOOL_SCHEMA["function"]


async def search(endpoint: Endpoint, query_list: list[str]) -> str:
    """The passages that fit each query best."""
    client = SearchClient(str(endpoint.search_url), topk=TOPK)
    try:
        return format_passages(query_list, await client.retrieve(query_list), CHARACTERS)
    finally:
        await client.aclose()


def reward(text: str, task: dict[str, Any]) -> dict[str, float]:
    """As the environment `search` scores its last turn."""
    scored = solver_reward(Trajectory((Turn(text),)), [task["answer"]])
    return {"reward": scored.score, "f1": scored.f1}


async def langgraph(task: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """LangGraph's own graph of a model and its tools. Its client closes none of its connections itself."""
    import httpx
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    async def found(query_list: list[str]) -> str:
        return await search(endpoint, query_list)

    tool = StructuredTool.from_function(
        coroutine=found,
        name=_FUNCTION["name"],
        description=_FUNCTION["description"],
        args_schema=_FUNCTION["parameters"],
    )
    async with httpx.AsyncClient() as http:
        model = ChatOpenAI(
            model=endpoint.model,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,  # type: ignore[arg-type]
            http_async_client=http,
        )
        shown = model.bind_tools([SEARCH_TOOL_SCHEMA])

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await shown.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode([tool]))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
        steps = graph.compile().astream(
            {"messages": task["messages"]}, {"recursion_limit": 2 * TURNS + 1}, stream_mode="values"
        )
        asked = 0
        async for state in steps:
            last = state["messages"][-1]
            asked += last.type == "ai"
            if asked == TURNS:
                break
    return reward(str(last.content), task)


async def anthropic(task: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """Anthropic's messages, streamed."""
    from anthropic import AsyncAnthropic

    tool = {**_FUNCTION, "input_schema": _FUNCTION["parameters"]}
    del tool["parameters"]
    messages: list[Any] = list(task["messages"])
    url = endpoint.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=endpoint.api_key) as client:
        for turn in range(1, TURNS + 1):
            async with client.messages.stream(
                model=endpoint.model, max_tokens=96, messages=messages, tools=[tool]
            ) as stream:
                said = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
            used = [block for block in said.content if block.type == "tool_use"]
            if not used or turn == TURNS:
                break
            found = [
                {
                    "type": "tool_result",
                    "tool_use_id": one.id,
                    "content": await search(endpoint, **dict(one.input)),  # type: ignore[call-overload]
                }
                for one in used
            ]
            messages.append({"role": "user", "content": found})
    return reward("".join(block.text for block in said.content if block.type == "text"), task)
