"""Plays a seat of the library's environments in this process, until a turn has no calls.
The library would start a script for each turn of a user.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from environments.turn_text import read_json

UNNAMED = "unnamed"  # the name of a call without one, since the library requires a name


class InProcessConfig(HarnessConfig):
    """No settings."""


class InProcessHarness(Harness[InProcessConfig]):
    """Talks and calls tools. Never runs code of the model."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Play from the prompt, or the conversation so far, to a turn without calls."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # Without the environment's proxy, which must not get requests to this machine.
            http = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False, timeout=_UNBOUNDED))
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack))
            talk = _Conversation(http, f"{endpoint}/chat/completions", secret, ctx.model, tools)
            return await talk.play(messages)


_UNBOUNDED = aiohttp.ClientTimeout(total=None)
"""A loaded engine may be slow. The player (`drzero.players.verifiers`) ends a hang."""


class _Tools:
    def __init__(
        self, schemas: list[dict[str, Any]], dispatch: dict[str, tuple[str, str]], servers: Any
    ) -> None:
        self.schemas, self._dispatch, self._servers = schemas, dispatch, servers

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], read_json(call["function"]["arguments"] or "{}")
        content: Any
        if name == UNNAMED:
            content = "Error: the call is not a JSON object that names a tool"
        elif name not in self._dispatch:
            there_are = ", ".join(self._dispatch) or "none"
            content = f"Error: there is no tool {name!r}; the tools are {there_are}"
        elif not isinstance(arguments, dict):
            content = f"Error: the arguments of {name} are not a JSON object"
        else:
            content = await call_mcp(self._servers, self._dispatch, name, arguments)
        answer = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
        return dict(bound_tool_message(answer))


class _Conversation:
    def __init__(self, http: aiohttp.ClientSession, url: str, secret: str, model: str, tools: _Tools) -> None:
        self._http, self._url, self._tools = http, url, tools
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._body: dict[str, Any] = {"model": model} | ({"tools": tools.schemas} if tools.schemas else {})

    async def play(self, messages: list[dict[str, Any]]) -> ProgramResult:
        """Play until a turn has no calls, or the context is full. The library records the turns."""
        while True:
            body = self._body | {"messages": messages}
            async with self._http.post(self._url, json=body, headers=self._headers) as response:
                text = await response.text()
            if response.status != 200:
                # A full context ends the conversation, as in the library's own programs. For other errors
                # the library reports its own record instead of this exit.
                full = any(marker in text.casefold() for marker in CONTEXT_OVERFLOW_MARKERS)
                return ProgramResult(0 if full else 1, "", text)
            message = json.loads(text)["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return ProgramResult(0, "", "")
            messages += [await self._tools.answer(call) for call in calls]


__all__ = ["InProcessHarness"]
