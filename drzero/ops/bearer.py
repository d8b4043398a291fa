"""Bearer tokens from the environment: a config key or flag would show them in files and process lists."""

import os

from drzero.ops.errors import UserError

MODEL_KEY = "OPENAI_API_KEY"
"""Key of the model servers that a run starts, and the default for `endpoint_key=`."""

AGENT_KEY = "AGENT_TOKEN"
"""The token of the agent's own service."""


PUBLIC_ADDRESS = "DRZERO_PUBLIC_ADDRESS"
"""The variable with the address at which others reach a service, if a tunnel leads to it."""


class TokenUnusable(UserError):
    """A token that cannot be sent. The message names its variable, not its value."""


def bearer_of(variable: str | None) -> str | None:
    """Return the token in that variable, or None. Raises TokenUnusable."""
    token = os.environ.get(variable, "").strip() if variable else ""
    # An HTTP library that rejects the token would print it.
    if not (token.isascii() and token.isprintable()):
        raise TokenUnusable(
            f"{variable} holds characters that an HTTP header cannot carry: set it to the key only"
        )
    return token or None


def bearer_headers(variable: str | None) -> dict[str, str]:
    """Return the header that a request carries. Raises TokenUnusable."""
    token = bearer_of(variable)
    return {"Authorization": f"Bearer {token}"} if token else {}


def without_token(text: str, variable: str | None) -> str:
    """Return a server's message with its token masked, because some servers repeat it."""
    token = bearer_of(variable)
    return text.replace(token, "***") if token else text
