"""Agents as users write them: the guide's own, and some with a fault that only many runs show."""

import asyncio
import os
import sys
import time
from typing import Any

import httpx
from openai import AsyncOpenAI

MODEL = "tiny"
KEPT: list[Any] = []
"""Clients that are never closed."""


class MyAgent:
    """The guide's example as it is printed there, but for the model's name and the number of tokens."""

    async def run(self, data, **extra_kwargs):  # type: ignore[no-untyped-def]
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(
                model=MODEL, messages=data["messages"], temperature=0, max_tokens=8
            )
        return 1.0  # random reward


async def ask(base_url: str, **fields: Any) -> Any:
    """One call, without the start-up cost of OpenAI's client."""
    question = [{"role": "user", "content": "Who came?"}]
    body = {"model": MODEL, "messages": question, "max_tokens": 2, **fields}
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        return (await http.post(f"{base_url}/chat/completions", json=body)).raise_for_status().json()


class Asks:
    """A good agent with its own opinion of its items: `number` says what goes wrong."""

    wrong = 17

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await ask(extra_kwargs["base_url"])
        return await self.judge(data)

    async def judge(self, data: dict[str, Any]) -> Any:
        return {"reward": 0.5, "format": 1}


class Raises(Asks):
    """One of fifty items has no answer."""

    async def judge(self, data: dict[str, Any]) -> Any:
        if data["number"] == self.wrong:
            data = {}
        return float(data["number"] >= 0)


class Blocks(Asks):
    """A blocking call in a coroutine."""

    async def judge(self, data: dict[str, Any]) -> Any:
        if data["number"] == self.wrong:
            time.sleep(2.5)
        return 1.0


class Leaks:
    """A client for each run, which nobody closes."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = httpx.AsyncClient(verify=False, timeout=60)
        KEPT.append(client)
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 1}
        await client.post(f"{extra_kwargs['base_url']}/completions", json=body)
        return 1.0


class FromEnvironment:
    """Reads the address where OpenAI's client does."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> int:
        await ask(os.environ["OPENAI_BASE_URL"])
        return 1


class Forgets:
    """Takes the address and the key out of the environment, as some frameworks do with a key."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> int:
        os.environ.pop("OPENAI_API_KEY")
        await ask(os.environ.pop("OPENAI_BASE_URL"))
        return 1


class Stops:
    """Has a line at which a debugger stops."""

    async def run(self, data: Any, **extra_kwargs: Any) -> float:
        breakpoint()
        return 1.0


class Misbehaves:
    """Ends as no agent should, by the item's `number`."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        match data["number"]:
            case 0:
                sys.exit("no key")
            case 1:
                raise asyncio.CancelledError
            case 2:
                await asyncio.sleep(600)
            case 3:
                raise ExceptionGroup("several", [ValueError("the first")])
            case 4:
                raise RuntimeError(f"refused with {os.environ['OPENAI_API_KEY']}")
            case 5:
                KEPT.append(asyncio.create_task(asyncio.sleep(600)))
        return 1.0


class Returns:
    """What the item says."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        return data["returns"]


class NoAgent:
    """It has nothing to run."""
