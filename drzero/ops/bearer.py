"""Bearer tokens of servers, which come from the environment alone: whose goes where.

    bearer_headers(MODEL_KEY)           # {"Authorization": "Bearer …"}, or nothing
    bearer_of("RETRIEVAL_TOKEN")        # the token, or None

One rule: a server gets the token that is meant for it, and no other one. The model servers that a run starts
get `OPENAI_API_KEY`, and require it; the server that `endpoint=` names gets the key of the variable that
`endpoint_key=` names, the same one by default; the retrieval service gets `RETRIEVAL_TOKEN`. A client
is given the variable of its server, and sends nothing where it is given none; redirects are not followed.

A config key or a flag would show a token in a run's files and in the process list; every process of a run
inherits its environment.
"""

import os

from drzero.ops.errors import UserError

MODEL_KEY = "OPENAI_API_KEY"
"""Of the model servers that a run starts, and of `endpoint=` unless `endpoint_key=` names another."""


class TokenUnusable(UserError):
    """A token that cannot be sent; the message names its variable and does not show it."""


def bearer_of(variable: str | None) -> str | None:
    """The token in that variable, if any; raises TokenUnusable."""
    token = os.environ.get(variable, "").strip() if variable else ""
    # Checked here, because an HTTP library that rejects it would print it.
    if not (token.isascii() and token.isprintable()):
        raise TokenUnusable(
            f"{variable} holds characters that an HTTP header cannot carry: set it to the key alone"
        )
    return token or None


def bearer_headers(variable: str | None) -> dict[str, str]:
    """The header that a request carries; raises TokenUnusable."""
    token = bearer_of(variable)
    return {"Authorization": f"Bearer {token}"} if token else {}


def without_token(text: str, variable: str | None) -> str:
    """What a server said, without its token: some repeat it."""
    token = bearer_of(variable)
    return text.replace(token, "***") if token else text
