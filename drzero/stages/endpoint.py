"""The endpoint that a stage converses with in place of a server of its own (`endpoint=`).

    drzero preview source=papers.jsonl endpoint=https://api.example.com/v1 model=a-model
    drzero synthesize endpoint=http://127.0.0.1:8001/v1 endpoint_model=a-model

Its key comes from the environment variable that `endpoint_key` names and goes nowhere but into its requests
(`drzero.ops.bearer`).
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from omegaconf import DictConfig

from drzero.ops.bearer import bearer_headers, bearer_of
from drzero.ops.console import say
from drzero.ops.text import is_loopback
from drzero.preflight.finding import refusal
from drzero.recipe.compose import CONFIG_DIR
from verl_ext.clients.chat_endpoint import ChatEndpoint

_TIMEOUT_S = 10.0


def preview_overrides(overrides: Sequence[str]) -> list[str]:
    """With `endpoint=`, `model=NAME` names the endpoint's model unless it is one of config/model/.

    Prompts are then those of a capable model on any hardware.
    """
    if not any(override.startswith("endpoint=") for override in overrides):
        return list(overrides)
    groups = {path.stem for path in (CONFIG_DIR / "model").glob("*.yaml")}
    named = [o for o in overrides if o.startswith("model=") and o.partition("=")[2] not in groups]
    others = [override for override in overrides if override not in named]
    chosen = [] if any(override.startswith("model=") for override in others) else ["model=qwen2.5-3b"]
    return [*chosen, *others, *(f"endpoint_{override}" for override in named)]


def chat_endpoint(config: DictConfig) -> ChatEndpoint:
    """The configured endpoint; raises PreflightFailed if it has to be asked for its model and has not one."""
    key, base = key_variable(config), base_of(config.endpoint)
    model = config.endpoint_model or served_name(base, None, key)
    return ChatEndpoint(base, model, key_variable=key, concurrency=config.solver.concurrency)


def key_variable(config: DictConfig) -> str:
    """The environment variable whose key the endpoint gets, which is said; raises TokenUnusable."""
    variable = str(config.endpoint_key)
    if bearer_of(variable):
        say("endpoint", f"requests to {config.endpoint} carry the key in {variable} (endpoint_key)")
    return variable


def base_of(address: str) -> str:
    """The address without the path of a request; a bare host gets the usual /v1."""
    base = address.rstrip("/").removesuffix("/chat/completions")
    return base if urlsplit(base).path.strip("/") else f"{base}/v1"


def identity_of(endpoint: ChatEndpoint) -> str:
    """What tells its model from any other."""
    return f"served as {endpoint.model} at {endpoint.base_url}"


def served_names(base: str, key: str | None = None) -> list[str]:
    """A server's names for its models, `key` the variable of its key.

    Raises PreflightFailed if it does not answer.
    """
    url = f"{base}/models"
    try:
        response = httpx.get(
            url, timeout=_TIMEOUT_S, trust_env=not is_loopback(base), headers=bearer_headers(key)
        )
        return [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        why = f"no OpenAI-compatible server answers at {url} ({type(error).__name__}: {error})"
        fix = "start it, or correct the address, such as http://127.0.0.1:8001/v1"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            fix = f"set its key in {key}, or name another variable with endpoint_key="
        raise refusal("endpoint", why, fix) from error


def served_name(base: str, wanted: str | None, key: str | None = None) -> str:
    """A server's name for its model; PreflightFailed if it does not answer or has another."""
    names = served_names(base, key)
    if wanted in names:
        return str(wanted)
    if wanted is not None or len(names) != 1:
        not_this = f", not {wanted}" if wanted else ""
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        why = f"the server at {base} has the models {shown or 'none'}{not_this}"
        raise refusal("endpoint_model", why, "choose one with endpoint_model=")
    return names[0]


def usd(config: DictConfig, tokens_in: int, tokens_out: int) -> float | None:
    """What so many tokens cost at the configured prices; None without both of them."""
    prices = config.usd_per_million_in, config.usd_per_million_out
    if None in prices:
        return None
    return float(tokens_in * prices[0] + tokens_out * prices[1]) / 1e6


def requests_report(endpoint: ChatEndpoint) -> dict[str, Any]:
    """How the endpoint's requests of this start went."""
    return {
        "requests": endpoint.requests,
        "failed_requests": endpoint.failed_requests,
        "answers_without_usage": endpoint.without_usage,
        "parameters_left_out": sorted(endpoint.left_out),
    }


def request_lines(report: Mapping[str, Any]) -> Sequence[str]:
    """What of that a reader should know."""
    lines = []
    if report["failed_requests"]:
        lines.append(
            f"{report['failed_requests']} of {report['requests']} requests failed and were repeated: what "
            "they cost is not in the tokens"
        )
    if report["answers_without_usage"]:
        lines.append(f"{report['answers_without_usage']} answers did not say how many tokens they took")
    if report["parameters_left_out"]:
        named = ", ".join(report["parameters_left_out"])
        lines.append(f"the model does not take {named}: it was asked without")
    return lines
