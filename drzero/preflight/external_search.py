"""Checks of a running retrieval service (`retrieval.url`): it must serve this run's index."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from drzero.ops.bearer import bearer_of
from drzero.ops.services.health import HealthCheck, ask
from drzero.ops.text import LOOPBACK
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.recipe.compose import retrieval_url
from drzero.recipe.indices import index_of
from search.embedders import model_identity
from search.index_info import ServedIndex, ServiceAway, ask_index
from search.wire import TOKEN_VARIABLE

_KEY = "retrieval.url"
_TIMEOUT_S = 10.0


def check_external_search(ctx: CheckContext) -> Iterator[Finding]:
    """It must serve this run's index. Raises ServiceUnusable for a refused token or another service."""
    url = retrieval_url(ctx.config.retrieval)
    yield from _token_in_the_clear(url)
    try:
        served = ask_index(url)
    except ServiceAway as away:
        # The run's machine may reach it.
        severity = error if ctx.machine.is_local or ctx.starting else warning
        yield severity(_KEY, str(away), "")
        return
    yield from _differences(ctx, served)
    if problem := ask(HealthCheck(url=f"{url}/health", timeout_s=_TIMEOUT_S)):
        yield error(_KEY, f"the service answers, but queries fail ({problem})", "read its log there")
    yield note(
        _KEY,
        f"{served.documents:,} documents ({served.chunks:,} chunks) of collection {served.collection!r}, "
        f"built with {served.embedder}, version {served.version[:12]}",
    )


def _token_in_the_clear(url: str) -> Iterator[Finding]:
    """Only a warning: within a cluster's network, the service itself speaks plain HTTP."""
    address = urlsplit(url)
    if address.scheme == "http" and address.hostname not in LOOPBACK and bearer_of(TOKEN_VARIABLE):
        why = f"anyone on the way to {address.hostname} can read the token in {TOKEN_VARIABLE}"
        yield warning(_KEY, why, "use https, or a tunnel (ssh -L) to 127.0.0.1")


def _differences(ctx: CheckContext, served: ServedIndex) -> Iterator[Finding]:
    index, embedder = index_of(ctx.config), ctx.config.retrieval.embedder
    if served.collection != index.name:
        key = "chroma.collection" if ctx.config.index == "chroma" else index.setting
        why = f"the service serves {served.collection!r}, and this run's index is {index.name!r}"
        yield error(key, why, f"name {served.collection!r} here, or correct the address")
    if model_identity(served.embedder) != model_identity(embedder):
        why = f"the service's index was built with {served.embedder}, but retrieval.embedder is {embedder}"
        yield error(
            "retrieval.embedder", why, f"set retrieval.embedder={served.embedder}, or correct the address"
        )
    if index.folder and index.folder.is_dir() and (own := ctx.index_info()).version != served.version:
        yield error(
            _KEY,
            f"the service's index has {served.documents:,} documents, version {served.version[:12]}, and "
            f"{index.setting} has {own.documents:,}, version {own.version[:12]}: prompts made from one are "
            "not about the other",
            f"restart the service on the present index, or set {index.setting} to its index",
        )
