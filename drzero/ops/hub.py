"""Whether the model hub answers, tried once per process: its client retries each file for half a minute."""

import re
import threading
from functools import cache

TIMEOUT_S = 4.0
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@cache
def hub_fault() -> str | None:
    """Return why the hub cannot be asked, to follow "because", or None if it answers."""
    from huggingface_hub import constants, is_offline_mode  # most processes need no hub

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answered: list[str | None] = []
    # A resolver may hang beyond the HTTP client's timeout, so ask in a thread that can be abandoned.
    asking = threading.Thread(target=lambda: answered.append(_ask(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    fault = answered[0] if answered else f"no answer within {TIMEOUT_S:g} s"
    place = constants.ENDPOINT.rpartition("@")[2]  # without a password
    return f"{place} does not answer ({fault})" if fault else None


def _ask(endpoint: str) -> str | None:
    import httpx
    from huggingface_hub import get_session

    try:
        status = get_session().head(endpoint, timeout=TIMEOUT_S).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return str(error) or type(error).__name__
    # Any other status is reported with the file that is requested later.
    return f"status {status}" if status == 429 or status >= 500 else None
