"""A proxy of the environment: it gets no request to this machine, and an unusable one is named."""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import aiohttp
import httpx
import httpx2
import pytest
import requests
from fastapi.responses import PlainTextResponse

from drzero.cli import main
from drzero.ops.errors import UserError
from drzero.ops.proxies import check_proxies, spare_loopback

DEAD = "http://127.0.0.1:9"
URL_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*URL_VARIABLES, "no_proxy", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def by_aiohttp(url: str) -> str:
    async def ask() -> str:
        async with aiohttp.ClientSession(trust_env=True) as http, http.get(url) as answer:
            return await answer.text()

    return asyncio.run(ask())


CLIENTS: dict[str, Callable[[str], str]] = {
    "httpx": lambda url: httpx.get(url).text,
    "httpx2, as openai has it": lambda url: httpx2.get(url).text,
    "requests": lambda url: requests.get(url, timeout=9).text,
    "aiohttp": by_aiohttp,
    "urllib": lambda url: urllib.request.urlopen(url).read().decode(),
    "curl, in a child": lambda url: subprocess.check_output(["curl", "-s", url], text=True),
}


@pytest.mark.parametrize("exempt", [{}, {"no_proxy": "localhost"}, {"NO_PROXY": "a.example, .b"}])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_asks_this_machine_through_the_proxy(client, host, exempt, start_peer, monkeypatch):
    peer = start_peer("/post", lambda body: body, {"/": PlainTextResponse("hi")})
    for name in URL_VARIABLES:
        monkeypatch.setenv(name, DEAD)
    for name, value in exempt.items():
        monkeypatch.setenv(name, value)
    spare_loopback()
    assert CLIENTS[client](peer.url.replace("127.0.0.1", host)) == "hi"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ("127.0.0.1,localhost,::1",) * 2),
        ({"no_proxy": "*"}, ("*", "*")),
        ({"NO_PROXY": "a"}, ("a,127.0.0.1,localhost,::1",) * 2),
        ({"no_proxy": "::1, a", "NO_PROXY": "b"}, ("::1,a,127.0.0.1,localhost", "b,127.0.0.1,localhost,::1")),
    ],
)
def test_the_hosts_that_the_user_exempts_stay_exempt(before, after, monkeypatch):
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # a child does it again
        spare_loopback()
        shown = subprocess.check_output(
            [sys.executable, "-c", "import os; print(os.environ['no_proxy'], os.environ['NO_PROXY'])"],
            text=True,
        )
        assert shown == " ".join(after) + "\n"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ALL_PROXY", "socks://10.0.0.1:1080/", "1:1080/) is no proxy's address. Write http://"),
        ("all_proxy", "socks5://h:1", "(socks5://h:1) is a SOCKS proxy, which needs the package socksio"),
        ("http_proxy", "http://h:port", "is no proxy's address"),
        ("HTTPS_PROXY", "http://", "is no proxy's address"),
        ("https_proxy", "http://h:99999", "is no proxy's address"),
        ("HTTP_PROXY", "http://me:secret@h:port", "(h:port) is no proxy's address"),
        ("NO_PROXY", "a.example,[::1]", "[::1]) is no list of hosts. Write an IPv6 address without"),
        ("no_proxy", "localhost:port", "is no list of hosts"),
        ("SSL_CERT_FILE", "/nowhere.pem", "(/nowhere.pem) is no file of certificates"),
        ("SSL_CERT_FILE", __file__, "is no file of certificates"),
    ],
)
def test_a_variable_that_no_client_can_use_is_named_in_one_line(name, value, words, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert main(["preview", "source=nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"drzero preview: {name} (") and error.count("\n") == 1
    assert words in error and error.endswith(", or unset the variable\n")
    assert "secret" not in error


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "10.0.0.1:3128", "HTTPS_PROXY": "http://me:secret@proxy.example"},
        {"ALL_PROXY": "https://[2001:db8::1]:8080", "NO_PROXY": "::1,10.0.0.0/8,.example,localhost:80"},
        {"http_proxy": " ", "NO_PROXY": ", ,"},
    ],
)
def test_usable_proxies_pass(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_proxies()


def test_an_unusable_proxy_keeps_nobody_from_reading_a_run(monkeypatch, capsys):
    monkeypatch.setenv("ALL_PROXY", "socks://h:1")
    with pytest.raises(UserError):
        check_proxies()
    assert main(["status", "paths.checkpoints=nowhere"]) == 2
    assert "no loop has been started" in capsys.readouterr().err
