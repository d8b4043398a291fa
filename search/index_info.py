"""What a retrieval service serves, asked from outside: its collection, embedder and version.

    served = ask_index("https://search.example.com")
    served.fingerprint      # that of the collection, as whoever opens it reads it

It is the server's `GET /index` (`search.serving.app`), with the bearer token of the environment.
"""

from dataclasses import dataclass

import httpx
import msgspec

from drzero.ops.bearer import bearer_headers, without_token
from drzero.ops.errors import UserError
from search.wire import TOKEN_VARIABLE, token_advice

_TIMEOUT_S = 10.0


class ServiceUnusable(UserError):
    """An address whose service cannot be searched as asked, and what to do about it."""


class ServiceAway(ServiceUnusable):
    """A service that does not answer now, or not from here."""


@dataclass(frozen=True)
class ServedIndex:
    """The collection of a service, and how it was built (`search.chroma.store.CollectionInfo`)."""

    collection: str
    embedder: str
    revision: str
    version: str
    documents: int
    chunks: int

    @property
    def fingerprint(self) -> str:
        """What is the same for the same documents and the same embedding weights, wherever they are."""
        return f"{self.version}@{self.revision}"


_decode = msgspec.json.Decoder(ServedIndex).decode


def ask_index(url: str) -> ServedIndex:
    """Ask the service at `url`; raises ServiceAway, ServiceUnusable, or TokenUnusable for its token."""
    try:
        # As the searches themselves: not through a proxy, and no redirect is followed.
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
