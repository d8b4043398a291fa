"""Async client of the retrieval service: one deadline over all attempts, jittered back-off, clear failures.

    passages = await SearchClient("http://127.0.0.1:8000").retrieve(["who founded Orrin"])

One client may serve several event loops, threads included (veRL's workers run their own loops): each loop
gets its own connection pool, because sockets belong to the loop that opened them. Light on purpose: veRL's
workers import it.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from search.wire import Passage

__all__ = ["Passage", "SearchClient", "SearchRequestError", "SearchUnavailable"]

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0


class SearchUnavailable(Exception):
    """The service gave no answer within the deadline: not the caller's fault."""


class SearchRequestError(Exception):
    """The service refused the request, or is not a retrieval service: asking again would not help."""


class _ServerFailure(Exception):
    """An answer 5xx."""


class SearchClient:
    """Client of one retrieval server.

    `deadline_s` (seconds) bounds a whole `retrieve`, waits included; one attempt may take a third of it, so
    that a connection that hangs leaves time for another. `token` is sent as a bearer token.
    """

    def __init__(
        self, base_url: str, topk: int = 3, deadline_s: float = 30.0, token: str | None = None
    ) -> None:
        self.url = f"{base_url.rstrip('/')}/retrieve"
        self.topk = topk
        self.deadline_s = deadline_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Passage]]:
        """Return the passages of each query, best first.

        Raises SearchUnavailable if connection errors, time-outs and answers 5xx last to the deadline,
        SearchRequestError at once for an answer 4xx or one that is not of the wire format.
        """
        if not queries:
            return []
        body = {"queries": list(queries), "topk": topk or self.topk, "return_scores": False}
        started, attempts, last = time.monotonic(), 0, "no answer"
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((httpx.TransportError, _ServerFailure)),
            wait=wait_random_exponential(multiplier=BACKOFF_FIRST_S, max=BACKOFF_MAX_S),
        )
        try:
            async with asyncio.timeout(self.deadline_s):
                async for attempt in retrying:
                    attempts += 1
                    with attempt:
                        try:
                            return await self._post(body)
                        except (httpx.TransportError, _ServerFailure) as error:
                            last = f"{type(error).__name__}: {error}".lstrip("_")
                            raise
        except UnicodeEncodeError as error:  # lone surrogates, which a model can write as JSON escapes
            raise SearchRequestError(f"a query is not valid Unicode: {error}") from error
        except TimeoutError:
            pass
        elapsed = time.monotonic() - started
        raise SearchUnavailable(
            f"{self.url} did not answer: {attempts} attempts in {elapsed:.1f} s "
            f"(deadline {self.deadline_s:g} s), last: {last}"
        )

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def _post(self, body: dict[str, Any]) -> list[list[Passage]]:
        response = await self._pool().post(self.url, json=body)
        if response.status_code >= 500:
            raise _ServerFailure(f"HTTP {response.status_code}: {_detail(response)}")
        if response.status_code != 200:
            raise SearchRequestError(f"{self.url} answered HTTP {response.status_code}: {_detail(response)}")
        try:
            result = response.json()["result"]
            answered = len(result)
        except (ValueError, KeyError, TypeError) as error:
            raise SearchRequestError(
                f"{self.url} is no retrieval service: it answered {response.text[:200]!r}"
            ) from error
        if answered != len(body["queries"]):
            raise SearchRequestError(f"{self.url} answered {answered} of {len(body['queries'])} queries")
        return result

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            # trust_env off: a proxy set for the internet must not swallow calls to our own services.
            self._pools[loop] = httpx.AsyncClient(
                headers=self._headers, timeout=self.deadline_s / 3, trust_env=False
            )
        return self._pools[loop]


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
