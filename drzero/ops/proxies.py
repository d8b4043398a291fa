"""The environment's proxies: never for this machine, and refused before a library fails on them."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from drzero.ops.errors import UserError
from drzero.ops.text import LOOPBACK

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def spare_loopback(*hosts: str) -> None:
    """Add this machine's names and `hosts` to `no_proxy`, for libraries and child processes."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    for name in ("no_proxy", "NO_PROXY"):
        entries = [entry.strip() for entry in (os.environ.get(name) or known).split(",") if entry.strip()]
        if entries != ["*"]:  # every host, but for some clients only if it stands alone
            entries += [*LOOPBACK, *hosts]
        os.environ[name] = ",".join(dict.fromkeys(entries))


def check_proxies() -> None:
    """Raise a UserError for a variable that fails HTTP clients as they are made."""
    for name in sorted(os.environ):
        if name.lower() in _PROXIES and (value := os.environ[name].strip()):
            with _named(name, value, "no proxy's address. Write http://HOST:PORT"):
                _try_proxy(value)
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if exempt:
        import httpx  # slow, and most environments have none of these variables

        name = "no_proxy" if os.environ.get("no_proxy") else "NO_PROXY"
        with _named(name, exempt, "no list of hosts. Write an IPv6 address without brackets or port"):
            httpx.Client(verify=False).close()
    if path := os.environ.get("SSL_CERT_FILE"):
        with _named("SSL_CERT_FILE", path, "no file of certificates. Name another"):
            ssl.create_default_context(cafile=path)


def _try_proxy(value: str) -> None:
    import httpx

    url = value if "://" in value else f"http://{value}"
    parts = urlsplit(url)
    if not parts.hostname or parts.port == 0:  # httpx fails later, at each request
        raise ValueError(value)
    httpx.Client(proxy=url, verify=False, trust_env=False).close()


@contextmanager
def _named(name: str, value: str, what: str) -> Iterator[None]:
    """Translate the errors, whose own words may show a password."""
    from httpx import InvalidURL

    shown = value.rpartition("@")[2][:200]
    try:
        yield
    except ImportError as error:
        message = f"{name} ({shown}) is a SOCKS proxy, which needs the package socksio: install it"
        raise UserError(f"{message}, or unset the variable") from error
    except (ValueError, OSError, InvalidURL) as error:
        raise UserError(f"{name} ({shown}) is {what}, or unset the variable") from error
