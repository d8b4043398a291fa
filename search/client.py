"""Async client of the retrieval service: one deadline over all attempts, jittered back-off, clear failures.

    passages = await SearchClient("http://127.0.0.1:8000").retrieve(["who founded Orrin"])

One client may serve several event loops, also in several threads (veRL's workers run their own loops): each
loop gets its own connection pool, because sockets belong to the loop that opened them. Few imports on
purpose: veRL's workers import it.

A busy server answers 503 or 429 with the seconds to wait (Retry-After). The client waits that long and a
random part longer, so that clients refused together do not come back together.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from search.wire import Passage, read_token, token_advice

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
# A wait requested by the server is extended by up to this share of it.
JITTER = 0.5
# As many as concurrent solver attempts (solver.concurrency). With httpx's 100 connections, of which it keeps
# 20, most calls of a step would open a new one, and the server could never batch more than 100 of them.
# Further calls wait for a connection: more would approach the limit of 1024 open files per process.
CONNECTIONS = 256
# Shorter than the minute or more after which our server and most load balancers close an idle connection: a
# request sent at that moment is lost.
KEEP_ALIVE_S = 30.0
# A query that the model or the index fails on fails every time, and each attempt costs everyone a batch.
SAME_FAILURES = 3
_BUSY = frozenset({408, 425, 429})


class SearchUnavailable(Exception):
    """The service gave no answer within the deadline; the request was not at fault."""


class SearchRequestError(Exception):
    """The service refused the request, or is not a retrieval service: a retry would not help."""


class SearchRefused(SearchRequestError):
    """The service refused these queries as too long or too many; `detail` is its message.

    It would answer other queries: the author of these is at fault.
    """

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class _ServerFailure(Exception):
    """An answer that a retry may change; `retry_after_s` is the wait that the server requests."""

    def __init__(self, status: int, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.retry_after_s = retry_after_s


class SearchClient:
    """Client of one retrieval server.

    `deadline_s` (seconds) bounds a whole `retrieve`, waits included; one attempt may take a third of it, so
    that a hanging connection leaves time for another. The bearer token comes from the environment
    (`search.wire.TOKEN_VARIABLE`); raises TokenUnusable if it cannot be sent.
    """

    def __init__(self, base_url: str, topk: int = 3, deadline_s: float = 30.0) -> None:
        self.url = f"{base_url.rstrip('/')}/retrieve"
        self.topk = topk
        self.deadline_s = deadline_s
        self._attempt_s = deadline_s / 3
        token = read_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Passage]]:
        """Return the passages of each query, best first.

        Raises SearchUnavailable if connection errors, timeouts and answers 5xx or 429 last until the deadline
        (or until no further attempt would fit into it), or if the server answers the same 500
        `SAME_FAILURES` times in a row, which the queries cause. SearchRefused for queries that are too long
        or too many, SearchRequestError at once for another 4xx or an answer that is not of the wire format.
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

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    def _pause_s(self, failures: Sequence[Exception], left_s: float) -> float:
        """Return the seconds to wait before the next attempt; `left_s` is until the deadline."""
        requested = getattr(failures[-1], "retry_after_s", 0.0)
        if not requested:
            # 16 is far beyond the longest pause; after a thousand failures the power would overflow.
            doublings = min(len(failures) - 1, 16)
            return random.uniform(0.0, min(BACKOFF_FIRST_S * 2**doublings, BACKOFF_MAX_S))
        pause_s = requested * random.uniform(1.0, 1.0 + JITTER)
        # If it exceeds the time left, a last attempt is made while there is time for one.
        return pause_s if pause_s < left_s else max(left_s - self._attempt_s, 0.0) or pause_s

    async def _post(self, body: dict[str, Any]) -> list[list[Passage]]:
        response = await self._pool().post(self.url, json=body)
        status = response.status_code
        if status >= 500 or status in _BUSY:
            # In seconds; a date is ignored, because it needs synchronised clocks.
            wait = response.headers.get("retry-after", "").strip()
            is_number = wait.isascii() and wait.isdigit()
            raise _ServerFailure(status, _detail(response), float(wait) if is_number else 0.0)
        if status != 200:
            detail = _detail(response)
            message = f"{self.url} answered HTTP {status}: {detail}"
            # A 422 is about the queries if its message names them; topk is set in the configuration.
            if status == 413 or (status == 422 and "queries" in detail):
                raise SearchRefused(message, detail)
            raise SearchRequestError(f"{message}: {token_advice()}" if status == 401 else message)
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
            self._pools[loop] = httpx.AsyncClient(
                headers=self._headers,
                # Waiting for a free connection is not the server's failure: the deadline bounds it.
                timeout=httpx.Timeout(self._attempt_s, pool=None),
                limits=httpx.Limits(
                    max_connections=CONNECTIONS,
                    max_keepalive_connections=CONNECTIONS,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
                # A proxy set for the internet must not swallow calls to our own services.
                trust_env=False,
            )
        return self._pools[loop]


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
