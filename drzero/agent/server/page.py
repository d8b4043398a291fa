"""The page at /: you ask, see searches and passages arrive, then the answer with its evidence.

POST /ask takes {"question": …, "earlier": [[question, answer], …], "compare": true} and sends events:
{"searching": [query, …]}, {"searching": [query, …], "found": [source, …]}, then {"answer": …, "note": …,
"index": …} or {"error": why}. Each names its `side` and `model`: 0 is the agent, 1 the one to compare with,
which is asked next.

The page is one file. Its policy allows its own script and style by their hashes, and connects to this server.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from drzero.agent.answer import Answer, Source
from drzero.agent.earlier import EXCHANGES
from drzero.agent.server.desk import Desk
from drzero.agent.server.events import EventStream, Tell
from drzero.agent.server.faults import logged
from drzero.ops.openai_http import read_body, sse
from search.client import SearchRequestError
from verl_ext.clients.served_model import SolverServerError

_FOLDER = Path(__file__).parent / "html"
_BODY_BYTES = 256 << 10
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Asked(BaseModel):
    question: Annotated[str, Field(max_length=8192, pattern=r"\S")]
    earlier: Annotated[list[tuple[str, str]], Field(max_length=EXCHANGES)] = []
    compare: bool = False


def page_routes(desk: Desk) -> list[Route]:
    """The page, and its questions."""
    page = _page(len(desk.askers) > 1)

    async def show(_: Request) -> Response:
        return page

    async def ask(request: Request) -> Response:
        asked = _Asked.model_validate_json(await read_body(request, _BODY_BYTES))

        side = 0

        async def work(tell: Tell) -> None:
            nonlocal side
            for side in range(len(desk.askers) if asked.compare else 1):
                await _answer(desk, asked, side, tell)

        return EventStream(work, lambda error: _event(desk, side, error=str(logged(error, "a question"))))

    return [Route("/", show), Route("/ask", ask, methods=["POST"])]


async def _answer(desk: Desk, asked: _Asked, side: int, tell: Tell) -> None:
    def progress(queries: Sequence[str], found: Sequence[Source] | None) -> None:
        passages = {} if found is None else {"found": [vars(source) for source in found]}
        tell(_event(desk, side, searching=list(queries), **passages))

    try:
        answer = await desk.ask(asked.question, asked.earlier, progress, side=side)
    except (SolverServerError, SearchRequestError) as error:
        tell(_event(desk, side, error=str(error)))
    else:
        tell(_event(desk, side, answer=answer.to_dict(), note=_note(answer), index=desk.index))


def _event(desk: Desk, side: int, **data: Any) -> str:
    return sse({"side": side, "model": desk.names[side], **data})


def _note(answer: Answer) -> str:
    if answer.state == "failed":
        return f"The question failed: {answer.attempt.failure}"
    return answer.note or "Found in a passage it read."


def _page(with_second: bool) -> Response:
    css, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))
    html = template.substitute(css=css, script=script, second="" if with_second else "hidden")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(css)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(html, headers=_HEADERS | {"Content-Security-Policy": policy})


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
