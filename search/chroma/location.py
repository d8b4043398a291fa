"""Where a Chroma is, and how to open it: a folder, or a Chroma server (`chroma run`, Chroma Cloud)."""

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import httpx

from drzero.ops.proxies import spare_loopback
from drzero.ops.text import is_loopback
from search.errors import StoreError, StoreNotReady
from search.stored_index import DATABASE_FILE, back_end_of

if TYPE_CHECKING:
    from chromadb.api import ClientAPI

API_KEY_VARIABLE = "CHROMA_API_KEY"
DEFAULT_TENANT, DEFAULT_DATABASE = "default_tenant", "default_database"
"""As in `chromadb.config`, which takes 50 MB to import: what only names a place must not."""
_BAD_ADDRESS = "a Chroma server's address is http(s)://HOST[:PORT], for Chroma Cloud with /TENANT/DATABASE"
_PORTS = {"http": 8000, "https": 443}  # Chroma's own port, and https's
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5.0, 10.0
_WRITE_TIMEOUT_S = 120.0  # A write also builds the graph
_FOLDER_PAGE = 1000  # Records per call. A folder accepts 5,461, a server what its quota says.


_semaphores: dict[tuple[str, int], threading.BoundedSemaphore] = {}  # by place and number of reads


@dataclass(frozen=True)
class Quota:
    """A Chroma server's limits: most records per call, and most queries at once (None: no limit)."""

    page: int = 250
    reads: int | None = None

    @contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Wait until one more query may be sent to this place, and send it inside."""
        if self.reads is None:
            yield
            return
        # The first thread's, for all: `setdefault` is one step.
        with _semaphores.setdefault((place, self.reads), threading.BoundedSemaphore(self.reads)):
            yield


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
    quota: Quota = field(default=Quota(), compare=False)

    @classmethod
    def parse(cls, text: "str | Path | ChromaPlace") -> "ChromaPlace":
        """Read a folder or `http(s)://HOST[:PORT][/TENANT/DATABASE]`. Raises StoreError."""
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
            # The message must not repeat the address, which may contain a key.
            raise StoreError(f"{_BAD_ADDRESS} and nothing else: put a key into {API_KEY_VARIABLE}")
        if address.scheme not in _PORTS or not host or len(names) not in (0, 2):
            raise StoreError(f"{text}: {_BAD_ADDRESS}")
        tenant, database = names or (DEFAULT_TENANT, DEFAULT_DATABASE)
        is_tls = address.scheme == "https"
        return cls(text, None, host, port or _PORTS[address.scheme], is_tls, tenant, database)

    def __str__(self) -> str:
        return self.text

    def within(self, quota: Quota) -> "ChromaPlace":
        """The place with a server's quota. Folders have no quotas."""
        return self if self.folder else replace(self, quota=quota)

    @property
    def page(self) -> int:
        """How many records to read or write in one call."""
        return _FOLDER_PAGE if self.folder else self.quota.page

    @property
    def url(self) -> str:
        """A server's address, without tenant and database."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"


@contextmanager
def connect(place: ChromaPlace | Path | str, create: bool = False) -> Iterator["ClientAPI"]:
    """Open a Chroma and close it afterwards, with `create` for writing. Raises StoreError, StoreNotReady."""
    import chromadb
    from chromadb.config import Settings
    from chromadb.errors import ChromaError

    from search.chroma.content import check_files

    place = ChromaPlace.parse(place)
    folder = place.folder
    if folder and (folder / DATABASE_FILE).is_file():
        check_files(folder)
    elif folder and not create:
        raise no_chroma(folder)
    try:
        if folder:
            client = chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False))
        else:
            client = _open_server(place, create)
        with cast(Any, client):
            yield client
    except httpx.HTTPError as error:
        raise StoreNotReady(f"Chroma at {place} failed: {plain(error)}") from error
    except ChromaError as error:
        raise StoreError(f"Chroma at {place} failed: {plain(error)}") from error
    except BaseException as error:
        # Chroma's Rust code panics over some damaged databases, and PyO3 exports no name for that.
        if type(error).__name__ != "PanicException":
            raise
        raise StoreNotReady(f"Chroma at {place} is damaged: {plain(error)}. Build it again") from error


def shard_counts(names: Iterable[str], prefix: str) -> set[int]:
    """The numbers of shards that these names belong to (named as in `search.chroma.sharded_store`)."""
    shard = re.compile(rf"\.?{re.escape(prefix)}-\d\d-of-(\d\d)(\.building|\.previous)?")
    return {int(found[1]) for name in names if (found := shard.fullmatch(name))}


def shards_in(folder: Path) -> set[int]:
    """The numbers of shards that a folder's shards belong to, unfinished ones included."""
    return shard_counts((path.name for path in folder.iterdir()), "shard") if folder.is_dir() else set()


def other_shards(where: object, found: int, asked: int) -> StoreError:
    """The error for an index whose number of shards is not `chroma.shards`."""
    holds = f"an index of {found} shards" if found > 1 else "an index without shards"
    return StoreError(
        f"{where} holds {holds}, and chroma.shards is {asked}: set chroma.shards={found} (or --shards) to "
        f"use it, or another chroma.path to build one of {asked}"
    )


def no_chroma(folder: Path) -> StoreError:
    """The error for a folder without a Chroma: StoreNotReady, unless the folder holds another index."""
    if found := shards_in(folder):
        return other_shards(folder, min(found), 1)
    if back_end_of(folder) == "faiss":
        return StoreError(f"{folder} holds a FAISS index, not a Chroma: set index=faiss faiss.path={folder}")
    return StoreNotReady(
        f"no Chroma folder at {folder}: make one with `drzero prepare-data chroma.path={folder} source=…`"
    )


def _open_server(place: ChromaPlace, create: bool) -> "ClientAPI":
    import chromadb
    from chromadb.config import Settings

    timeout = httpx.Timeout(_WRITE_TIMEOUT_S if create else _READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    headers = request_headers(place)
    if is_loopback(place.host):
        # The environment's proxy must not see the API key. Chroma's client heeds only `no_proxy`.
        spare_loopback(place.host)
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
    except Exception as error:  # ValueError, or a bare Exception for the unexpected
        raise StoreError(f"the Chroma server at {place} refuses us: {plain(error)}") from error
    # chromadb (1.5.9) has no setting for a timeout; a test fails when it gets one.
    cast(Any, client)._server._session.timeout = timeout
    return client


def _check_server(place: ChromaPlace, headers: dict[str, str], timeout: httpx.Timeout) -> None:
    """Raise StoreError unless a Chroma with the database answers. Chroma's client would wait for ever."""
    path = f"/api/v2/tenants/{place.tenant}/databases/{place.database}"
    try:
        answer = httpx.get(place.url + path, headers=headers, timeout=timeout)
    except httpx.HTTPError as error:
        raise StoreNotReady(
            f"no Chroma server answers at {place} ({plain(error)}): start one (`chroma run --path … "
            f"--port {place.port}`), or correct the address"
        ) from error
    status = answer.status_code
    if status in (401, 403):
        key = "its API key" if headers else f"an API key in {API_KEY_VARIABLE}, which is sent over https only"
        raise StoreError(f"the Chroma server at {place} refuses access (HTTP {status}): check {key}")
    if status == 404 and "error" in answer.text:
        raise StoreError(
            f"the Chroma server at {place} has no database {place.database!r} of a tenant {place.tenant!r}: "
            "create it there, or correct the address"
        )
    if status == 429 or status >= 500:
        raise StoreNotReady(f"the Chroma server at {place} is not ready: it answered HTTP {status}")
    if status != 200:
        raise StoreError(f"{place} is no Chroma server, or not one of version 1: it answered HTTP {status}")


def request_headers(place: ChromaPlace) -> dict[str, str]:
    """Return the headers of requests to a server, with the API key if nobody can read it on the way."""
    key = _api_key()
    # Checked here: an HTTP library that rejects the key would print it.
    if not (key.isascii() and key.isprintable()):
        raise StoreError(f"{API_KEY_VARIABLE} holds characters that an HTTP header cannot carry")
    return {"X-Chroma-Token": key} if key and (place.tls or is_loopback(place.host)) else {}


def plain(error: BaseException) -> str:
    """Return an error as one line, without the API key."""
    text = f"{type(error).__name__}: {error}"
    if key := _api_key():
        text = text.replace(key, "***")
    return " ".join(text.split())[:500]


def _api_key() -> str:
    return os.environ.get(API_KEY_VARIABLE, "").strip()
