"""Where a Chroma lives, and how to reach it: a folder, or a Chroma server (`chroma run`, Chroma Cloud).

    with connect("outputs/corpus/chromadb") as client: …
    with connect("https://api.trychroma.com/TENANT/DATABASE") as client: …  # the key from CHROMA_API_KEY

A folder is opened by Chroma itself, so only one with a whole database file is given to it: Chroma makes an
empty database of whatever else it finds. Every call to a server has a time-out, and the API key travels only
where nobody else can read it: over TLS, or within this machine.
"""

import ipaddress
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import chromadb
import httpx
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT, Settings
from chromadb.errors import ChromaError

from search.chroma_files import DATABASE_FILE, FilesDamaged, check_files

API_KEY_VARIABLE = "CHROMA_API_KEY"
_API_KEY_HEADER = "X-Chroma-Token"
# Chroma's own port, and the one of https.
_PORTS = {"http": 8000, "https": 443}
# A search that takes longer is better given up: its client has a deadline too. A server that writes also
# builds its graph.
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 120.0


class StoreError(Exception):
    """A Chroma or a collection that cannot be used as asked, and what to do about it."""


class StoreAway(StoreError):
    """A Chroma that is not there or does not answer just now: the same address may work later."""


class StoreUnavailable(Exception):
    """An open index cannot answer just now; it is tried again at the next query."""


@dataclass(frozen=True)
class ChromaPlace:
    """A folder (`folder` is set), or a database of a Chroma server (`host` is set)."""

    text: str
    folder: Path | None = None
    host: str = ""
    port: int = 0
    tls: bool = False
    tenant: str = DEFAULT_TENANT
    database: str = DEFAULT_DATABASE

    @classmethod
    def parse(cls, text: "str | Path | ChromaPlace") -> "ChromaPlace":
        """Read a folder or `http(s)://HOST[:PORT][/TENANT/DATABASE]`; raises StoreError for anything else."""
        if isinstance(text, ChromaPlace):
            return text
        if isinstance(text, Path) or "://" not in text:
            return cls(str(text), folder=Path(text))
        try:
            address = urlsplit(text)
            host, port = address.hostname, address.port
        except ValueError:
            raise StoreError(_BAD_ADDRESS) from None
        names = [name for name in address.path.split("/") if name]
        if address.username or address.password or address.query or address.fragment:
            # The address itself is not repeated: what is in it may be a key.
            raise StoreError(f"{_BAD_ADDRESS} and nothing else: a key belongs into {API_KEY_VARIABLE}")
        if address.scheme not in _PORTS or not host or len(names) not in (0, 2):
            raise StoreError(f"{text}: {_BAD_ADDRESS}")
        tenant, database = names or (DEFAULT_TENANT, DEFAULT_DATABASE)
        return cls(
            text,
            host=host,
            port=port or _PORTS[address.scheme],
            tls=address.scheme == "https",
            tenant=tenant,
            database=database,
        )

    def __str__(self) -> str:
        return self.text

    @property
    def url(self) -> str:
        """The address of a server, without tenant and database."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"


_BAD_ADDRESS = "a Chroma server's address is http(s)://HOST[:PORT], for Chroma Cloud with /TENANT/DATABASE"


@contextmanager
def connect(place: ChromaPlace | Path | str, create: bool = False) -> Iterator[ClientAPI]:
    """Open a Chroma, release it afterwards; raises StoreError for one that cannot be used as asked.

    It is StoreAway for one that is not there, damaged or lost on the way.

    `create` is for writing: a folder is made where there is none, and calls to a server may take longer.
    """
    place = ChromaPlace.parse(place)
    try:
        with (
            _folder_client(place.folder, create) if place.folder else _server_client(place, create) as client
        ):
            yield client
    except httpx.HTTPError as error:
        raise StoreAway(f"Chroma at {place} failed: {plain(error)}") from error
    except ChromaError as error:
        raise StoreError(f"Chroma at {place} failed: {plain(error)}") from error


@contextmanager
def _folder_client(folder: Path, create: bool) -> Iterator[ClientAPI]:
    if (folder / DATABASE_FILE).is_file():
        try:
            check_files(folder)
        except FilesDamaged as error:
            raise StoreAway(f"the Chroma folder {folder} is damaged: {error}. Build it again") from error
    elif not create:
        raise StoreAway(
            f"no Chroma folder at {folder}: build one with `python -m search.index --chroma-path {folder} …`"
        )
    settings = Settings(anonymized_telemetry=False)
    with cast(Client, chromadb.PersistentClient(str(folder), settings=settings)) as client:
        yield client


@contextmanager
def _server_client(place: ChromaPlace, create: bool) -> Iterator[ClientAPI]:
    timeout = httpx.Timeout(_WRITE_TIMEOUT_S if create else _READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    headers = request_headers(place)
    if _is_loopback(place.host):
        _spare_the_proxy(place.host)
    _check_server(place, headers, timeout)
    try:
        client = chromadb.HttpClient(
            host=place.host if ":" not in place.host else f"[{place.host}]",
            port=place.port,
            ssl=place.tls,
            headers=headers,
            settings=Settings(anonymized_telemetry=False),
            tenant=place.tenant,
            database=place.database,
        )
    except Exception as error:  # Chroma raises ValueError, or a bare Exception, for what it does not expect
        raise StoreError(f"the Chroma server at {place} refuses us: {plain(error)}") from error
    with cast(Client, client) as opened:
        # chromadb (1.5.9) waits for ever and has no setting for it; a test says when it has.
        cast(Any, opened)._server._session.timeout = timeout
        yield opened


def request_headers(place: ChromaPlace) -> dict[str, str]:
    """Return the headers of requests to a server: the API key, where nobody can read it on the way."""
    key = _api_key()
    # Checked here, because an HTTP library that finds it unfit would say so with the key in its message.
    if not (key.isascii() and key.isprintable()):
        raise StoreError(f"{API_KEY_VARIABLE} holds characters that an HTTP header cannot carry")
    return {_API_KEY_HEADER: key} if key and (place.tls or _is_loopback(place.host)) else {}


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _spare_the_proxy(host: str) -> None:
    """Exempt a host within this machine from the environment's proxy, which would be sent the API key.

    Chroma's client goes by the environment and has no setting for it.
    """
    spared = urllib.request.getproxies_environment().get("no", "")
    if host not in (name.strip() for name in spared.split(",")):
        # In small letters, which go before capitals.
        os.environ["no_proxy"] = f"{spared},{host}" if spared else host


def _check_server(place: ChromaPlace, headers: dict[str, str], timeout: httpx.Timeout) -> None:
    """Raise StoreError unless a Chroma with the database answers in time, for which its client would wait."""
    path = f"/api/v2/tenants/{place.tenant}/databases/{place.database}"
    try:
        answer = httpx.get(place.url + path, headers=headers, timeout=timeout)
    except httpx.HTTPError as error:
        raise StoreAway(
            f"no Chroma server answers at {place} ({plain(error)}): start one (`chroma run --path … "
            f"--port {place.port}`), or correct the address"
        ) from error
    if answer.status_code in (401, 403):
        key = "its API key" if headers else f"an API key in {API_KEY_VARIABLE}, which is sent over https only"
        refusal = f"refuses access (HTTP {answer.status_code})"
        raise StoreError(f"the Chroma server at {place} {refusal}: check {key}")
    if answer.status_code == 404 and "error" in answer.text:
        raise StoreError(
            f"the Chroma server at {place} has no database {place.database!r} of a tenant {place.tenant!r}: "
            "make it there, or correct the address"
        )
    if answer.status_code == 429 or answer.status_code >= 500:
        raise StoreAway(f"the Chroma server at {place} is not ready: it answered HTTP {answer.status_code}")
    if answer.status_code != 200:
        raise StoreError(
            f"{place} is no Chroma server, or not one of version 1: it answered HTTP {answer.status_code}"
        )


def plain(error: BaseException) -> str:
    """One line of an error, without the API key should a server have repeated it."""
    text = f"{type(error).__name__}: {error}"
    if key := _api_key():
        text = text.replace(key, "***")
    return " ".join(text.split())[:500]


def _api_key() -> str:
    return os.environ.get(API_KEY_VARIABLE, "").strip()
