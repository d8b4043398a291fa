"""Async client of the retrieval service: one deadline for all attempts, jittered back-off, clear failures."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import httpx

from drzero.ops.bearer import bearer_headers
from drzero.ops.text import encodable
from search.wire import TOKEN_VARIABLE, Passage, token_advice

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
# The longest random extra wait, as a share of Retry-After: refused clients should not all return together.
JITTER = 0.5
# As many as solver.concurrency. httpx's 100 would cap batches, more would near the limit of 1,024 open files.
CONNECTIONS = 256
# Servers and load balancers close idle connections after a minute or more, and lose a request sent just then.
KEEP_ALIVE_S = 30.0
# Retrying a query that breaks the model or the index is pointless, and slows everyone's batch.
SAME_FAILURES = 3
_BUSY = frozenset({408, 425, 429})


class SearchUnavailable(Exception):
    """The service gave no answer before the deadline."""


class SearchRequestError(Exception):
    """The service rejected the request, or is not a retrieval service. Retrying will not help."""


class SearchRefused(SearchRequestError):
    """The service rejected these queries as too long or too many. `detail` is its message."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class _ServerFailure(Exception):
    """An error response worth a retry. `retry_after_s` is the wait that the server asked for."""

    def __init__(self, status: int, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.retry_after_s = retry_after_s


class SearchClient:
    """Client of one server, for several event loops and threads. Raises TokenUnusable for a bad bearer token.

    `deadline_s` (seconds) bounds a whole `retrieve`, waits included. One attempt gets a third of it.
    """

    def __init__(self, base_url: str, topk: int = 3, deadline_s: float = 30.0) -> None:
        self.url = f"{base_url.rstrip('/')}/retrieve"
        self.topk = topk
        self.deadline_s = deadline_s
        self._attempt_s = deadline_s / 3
        self._headers = bearer_headers(TOKEN_VARIABLE)
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Passage]]:
        """Return each query's passages, best first, or raise SearchUnavailable or SearchRequestError.

        SearchUnavailable: failures until the deadline, or the same 500 `SAME_FAILURES` times.
        """
        if not queries:
            return []
        body = {"queries": list(queries), "topk": topk or self.topk, "return_scores": False}
        started, failures = time.monotonic(), list[httpx.TransportError | _ServerFailure]()
        try:
            async with asyncio.timeout(self.deadline_s):
                while True:
                    try:
                        return await self._post(body)
                    except (httpx.TransportError, _ServerFailure) as error:
                        failures.append(error)
                    last = failures[-SAME_FAILURES:]
                    is_500 = all(isinstance(error, _ServerFailure) and error.status == 500 for error in last)
                    is_same = len(last) == SAME_FAILURES and len(set(map(str, last))) == 1
                    left_s = self.deadline_s - (time.monotonic() - started)
                    pause_s = self._pause_s(failures, left_s)
                    if (is_500 and is_same) or pause_s >= left_s:
                        break
                    await asyncio.sleep(pause_s)
        except UnicodeEncodeError as error:  # lone surrogates, which a model can write as JSON escapes
            raise SearchRequestError(f"a query is not valid Unicode: {error}") from error
        except TimeoutError:
            pass
        elapsed = time.monotonic() - started
        reason = f"{type(failures[-1]).__name__}: {failures[-1]}".lstrip("_") if failures else "no answer"
        raise SearchUnavailable(
            f"{self.url} did not answer: {len(failures)} attempts in {elapsed:.1f} s "
            f"(deadline {self.deadline_s:g} s), last: {reason}"
        )

    async def passage(self, key: str) -> str | None:
        """Return the passage with this id, or None. Raises SearchUnavailable, at once."""
        url = f"{self.url.removesuffix('/retrieve')}/passages/{quote(key, safe='')}"
        try:
            response = await self._pool().get(url, timeout=self.deadline_s)
        except httpx.TransportError as error:
            raise SearchUnavailable(f"{url} did not answer: {type(error).__name__}: {error}") from error
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise SearchUnavailable(f"{url} answered HTTP {response.status_code}: {_detail(response)}")
        return str(encodable(response.json())["text"])

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    def _pause_s(self, failures: Sequence[Exception], left_s: float) -> float:
        requested = getattr(failures[-1], "retry_after_s", 0.0)
        if not requested:
            # Already far beyond the longest pause; 2**1000 would overflow.
            doublings = min(len(failures) - 1, 16)
            return random.uniform(0.0, min(BACKOFF_FIRST_S * 2**doublings, BACKOFF_MAX_S))
        pause_s = requested * random.uniform(1.0, 1.0 + JITTER)
        # If the wait exceeds the deadline, make one last attempt just before it.
        return pause_s if pause_s < left_s else max(left_s - self._attempt_s, 0.0) or pause_s

    async def _post(self, body: dict[str, Any]) -> list[list[Passage]]:
        response = await self._pool().post(self.url, json=body)
        status = response.status_code
        if status >= 500 or status in _BUSY:
            # A date is ignored, because it needs synchronised clocks.
            wait = response.headers.get("retry-after", "").strip()
            is_number = wait.isascii() and wait.isdigit()
            raise _ServerFailure(status, _detail(response), float(wait) if is_number else 0.0)
        if status != 200:
            detail = _detail(response)
            message = f"{self.url} answered HTTP {status}: {detail}"
            # A 422 that does not name the queries is about topk, which the configuration sets.
            if status == 413 or (status == 422 and "queries" in detail):
                raise SearchRefused(message, detail)
            raise SearchRequestError(f"{message}: {token_advice()}" if status == 401 else message)
        try:
            result = encodable(response.json())["result"]
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
            self._pools[loop] = httpx.AsyncClient(
                headers=self._headers,
                # The deadline already bounds the wait for a free connection.
                timeout=httpx.Timeout(self._attempt_s, pool=None),
                limits=httpx.Limits(
                    max_connections=CONNECTIONS,
                    max_keepalive_connections=CONNECTIONS,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
                # Our own services must not be called through the internet's proxy.
                trust_env=False,
            )
        return self._pools[loop]


def _detail(response: httpx.Response) -> str:
    try:
        return str(encodable(response.json())["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
