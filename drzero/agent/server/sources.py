"""An address on this server for each passage, where a reader of an answer can see it.

With a token an address carries a signature instead, so that a link from an answer opens in a browser.
"""

import hashlib
import hmac
from html import escape
from urllib.parse import quote

from cachetools import LRUCache
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from drzero.agent.answer import Source
from drzero.ops.openai_http import RequestRefused
from search.client import SearchClient
from search.stored_index import passage_text

_SEEN_CHARACTERS = 16 << 20
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>{name}</title><style>body{{max-width:44rem;margin:2rem auto;padding:0 1rem;font:1rem/1.5 sans-serif;
white-space:pre-wrap;overflow-wrap:anywhere}}h1{{font-size:1rem;opacity:.7}}</style>
<h1>{name}</h1><main>{text}</main></html>
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Sources:
    """Passages by id: the ones that answers showed, and the index's."""

    def __init__(self, search: SearchClient, token: str | None) -> None:
        self._search, self._token = search, token
        # An index of FAISS reads its whole corpus for an id.
        self._seen: LRUCache[str, str] = LRUCache(_SEEN_CHARACTERS, len)
        self.routes = [Route("/sources/{key:path}", self._show)]

    def address(self, base: str, source: Source) -> str:
        """The passage's address below the server's own."""
        text = passage_text(source.title, source.text)
        key = source.id or hashlib.sha256(text.encode()).hexdigest()
        if len(text) <= _SEEN_CHARACTERS:
            self._seen[key] = text
        signed = f"?key={self._signature(key)}" if self._token else ""
        return f"{base}sources/{quote(key, safe='')}{signed}"

    def opens(self, key: str, signature: str) -> bool:
        """Whether an address with this signature is one of ours."""
        return hmac.compare_digest(signature.encode(), self._signature(key).encode())

    def _signature(self, key: str) -> str:
        return hmac.new((self._token or "").encode(), key.encode(), hashlib.sha256).hexdigest()[:32]

    async def _show(self, request: Request) -> Response:
        key = request.path_params["key"]
        text = self._seen.get(key) or await self._search.passage(key)
        if text is None:
            raise RequestRefused(f"the index has no passage {key!r}", status=404)
        return HTMLResponse(_PAGE.format(name=escape(key), text=escape(text)), headers=_HEADERS)
