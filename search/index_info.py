"""Ask a retrieval service for its collection, embedder and version (`GET /index`, with the bearer token)."""

from dataclasses import dataclass

import httpx
import msgspec

from drzero.ops.bearer import bearer_headers, without_token
from drzero.ops.errors import UserError
from search.wire import TOKEN_VARIABLE, token_advice

_TIMEOUT_S = 10.0


class ServiceUnusable(UserError):
    """A service that cannot be searched as asked. The message says what to do."""


class ServiceAway(ServiceUnusable):
    """A service that does not answer now, or not from here."""


@dataclass(frozen=True)
class ServedIndex:
    """A service's collection, and how it was built (`search.stored_index.CollectionInfo`)."""

    collection: str
    embedder: str
    revision: str
    version: str
    documents: int
    chunks: int

    @property
    def fingerprint(self) -> str:
        """Equal for equal documents and embedding weights."""
        return f"{self.version}@{self.revision}"


_decode = msgspec.json.Decoder(ServedIndex).decode


def ask_index(url: str) -> ServedIndex:
    """Ask the service at `url`. Raises ServiceAway, ServiceUnusable, or TokenUnusable."""
    try:
        # Like the searches: no proxy, no redirects.
        answer = httpx.get(
            f"{url}/index", headers=bearer_headers(TOKEN_VARIABLE), timeout=_TIMEOUT_S, trust_env=False
        )
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ServiceAway(
            f"no retrieval service answers at {url} ({type(error).__name__}: {error}): start it there "
            "(`drzero serve-search`), or correct the address"
        ) from error
    if answer.status_code == 401:
        raise ServiceUnusable(f"the retrieval service at {url} needs a bearer token: {token_advice()}")
    said = f"HTTP {answer.status_code} {without_token(answer.text[:200], TOKEN_VARIABLE)!r}"
    if answer.status_code >= 500:
        raise ServiceAway(f"the retrieval service at {url} answers with {said}: see to it there")
    try:
        return _decode(answer.content)
    except msgspec.MsgspecError as error:
        raise ServiceUnusable(
            f"{url} is no retrieval service of this project: /index is answered with {said}. Correct the "
            "address"
        ) from error
