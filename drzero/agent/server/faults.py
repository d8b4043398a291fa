"""An error as the answer to the request that it ended."""

import logging

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from drzero.agent.server.desk import RETRY_AFTER_S, Busy
from drzero.ops.errors import RunFailed, UserError
from drzero.ops.openai_http import GONE, RequestRefused, refusal
from search.client import SearchRequestError, SearchUnavailable
from verl_ext.clients.chat_endpoint import ConversationRefused
from verl_ext.clients.served_model import ServerUnavailable

NOT_AGAIN = {"x-should-retry": "false"}
"""OpenAI's client repeats a failed request twice by itself, and a question may have taken its deadline."""
_SERVICE = (
    UserError,
    RunFailed,
    SearchRequestError,
    SearchUnavailable,
    ServerUnavailable,
    ConversationRefused,
)
_log = logging.getLogger(__name__)
EXPECTED = (RequestRefused, ValidationError, Busy, ClientDisconnect, HTTPException, TimeoutError, *_SERVICE)


def logged(error: Exception, what: str) -> RequestRefused:
    """`refused`, for an error that is not raised on: the log gets an unexpected one."""
    refusal = refused(error)
    if refusal.status == 500:
        _log.error("%s failed", what, exc_info=error)
    return refusal


def refused(error: Exception) -> RequestRefused:
    """The client's answer. An unexpected error stays in the log."""
    match error:
        case RequestRefused():
            return error
        case ValidationError():
            return refusal(error)
        case Busy():
            wait = {"Retry-After": str(RETRY_AFTER_S)}
            return RequestRefused(str(error), code="rate_limit_exceeded", status=429, headers=wait)
        case ClientDisconnect():
            return RequestRefused("the client left", status=GONE)
        case HTTPException():
            return RequestRefused(error.detail, status=error.status_code, headers=error.headers)
        case TimeoutError():
            return RequestRefused("no answer before the deadline", status=504, headers=NOT_AGAIN)
    if isinstance(error, _SERVICE):
        return RequestRefused(str(error), status=503)
    return RequestRefused("the server failed on this request: its log has the reason", status=500)
