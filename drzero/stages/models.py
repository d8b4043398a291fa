"""The model a stage talks to: its own, or one behind `endpoint=`. Only requests carry the endpoint's key."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from omegaconf import DictConfig

from drzero.ops.bearer import MODEL_KEY, bearer_headers, bearer_of
from drzero.ops.console import say
from drzero.ops.hub import HUB_ID
from drzero.ops.text import counted, is_loopback
from drzero.preflight.finding import refusal
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.compose import fitting_hardware, options
from drzero.recipe.fingerprint import fingerprint_model
from drzero.recipe.overrides import PLAIN_MODEL
from drzero.stages.result import RESULT
from verl_ext.clients.chat_endpoint import ChatEndpoint
from verl_ext.clients.search_agent import Conversation
from verl_ext.clients.served_model import NOT_LET_IN, SolverServerError, words_of
from verl_ext.method.prompts import solver_messages

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StageModel:
    """A completions server that takes token ids, or a chat endpoint."""

    name: str
    identity: str  # tells it from any other model
    shown: str
    url: str = ""
    tokenizer: Any = None
    key_variable: str = MODEL_KEY  # the environment variable with the server's key
    endpoint: ChatEndpoint | None = None  # replaces `url` and `tokenizer`


def stage_model(config: DictConfig, name: str) -> StageModel:
    """The stage's own model, served as `name`, or the one behind `endpoint=`. Raises PreflightFailed."""
    if config.endpoint is None:
        return own_model(config, name)
    return completions_model(config) if config.get("api") == "completions" else chat_model(config)


def own_model(config: DictConfig, name: str, key: str = "solver.model_path") -> StageModel:
    """The model the stage serves. Raises PreflightFailed about `key` unless it can search."""
    path = str(config.solver.model_path)
    tokenizer = load_chat_tokenizer(path, key)
    return StageModel(name, fingerprint_model(path), path, completions_url(config), tokenizer)


def model_name(base_model: str) -> str:
    """The model's name in requests: its hub id, also of a folder in the hub's cache, or its folder's name."""
    if cached := re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+$", base_model):
        return f"{cached[1]}/{cached[2]}"
    is_hub_id = HUB_ID.fullmatch(base_model) and not Path(base_model).is_dir()
    return base_model if is_hub_id else Path(base_model).name


def completions_url(config: DictConfig) -> str:
    """The stage's own model server."""
    return f"http://{config.solver.host}:{config.solver.port}/v1/completions"


def completions_model(config: DictConfig) -> StageModel:
    """The model behind `endpoint=` as a server of token ids. Raises PreflightFailed.

    Its identity is address and name: neither alone tells it apart.
    """
    tokenizer = load_chat_tokenizer(config.tokenizer, "tokenizer")
    key, base = key_variable(config), base_of(config.endpoint)
    name = served_name(base, config.endpoint_model, key)
    shown = f"{name} at {base}"
    return StageModel(name, f"served as {shown}", shown, f"{base}/completions", tokenizer, key)


def chat_model(config: DictConfig) -> StageModel:
    """The model behind `endpoint=`. Raises PreflightFailed if the server does not tell its name."""
    key, base = key_variable(config), base_of(config.endpoint)
    model = config.endpoint_model or served_name(base, None, key)
    endpoint = ChatEndpoint(base, model, key_variable=key, concurrency=config.solver.concurrency)
    shown = f"{model} at {endpoint.base_url}"
    return StageModel(model, f"served as {shown}", shown, endpoint=endpoint)


def greet(config: DictConfig, model: StageModel) -> None:
    """Ask an endpoint before anything is built, unless the run is finished. Raises PreflightFailed."""
    if model.endpoint is None or (Path(config.run.dir) / RESULT).exists():
        return
    say("endpoint", f"asking {model.shown} once")
    try:
        asyncio.run(model.endpoint.greet(solver_messages("Who are you?", "full"), config.solver.deadline_s))
    except SolverServerError as error:
        raise refusal("endpoint", str(error), "start it, or correct the address or the model") from error


def completed(stage: str, overrides: Sequence[str]) -> list[str]:
    """A stage's overrides, with what its command adds to them."""
    complete = {
        "preview": preview_overrides,
        "evaluate": evaluate_overrides,
        "warm_start": warm_start_overrides,
    }.get(stage, list)
    return complete(overrides)


def preview_overrides(overrides: Sequence[str]) -> list[str]:
    """With `endpoint=`, `model=NAME` names the endpoint's model unless config/model/ has NAME.

    The sample of `source=` is indexed for this preview alone: on a CPU by the small embedder, in seconds.
    """
    given = {override.partition("=")[0] for override in overrides}
    chosen, others, named = list[str](), list(overrides), list[str]()
    if "endpoint" in given:
        ours = options("model")
        named = [o for o in overrides if o.startswith("model=") and o.partition("=")[2] not in ours]
        others = [override for override in overrides if override not in named]
        chosen = [] if any(override.startswith("model=") for override in others) else [f"model={PLAIN_MODEL}"]
    return [*chosen, *sample_embedder(overrides), *others, *(f"endpoint_{override}" for override in named)]


def sample_embedder(overrides: Sequence[str]) -> list[str]:
    """The small embedder for a sample of `source=` that is indexed on a CPU, unless one is chosen."""
    given = {override.partition("=")[0] for override in overrides}
    typed = [o.partition("=")[2] for o in overrides if o.startswith("hardware=")]
    if "source" not in given or "retrieval.embedder" in given:
        return []
    is_cpu = (typed or [fitting_hardware(overrides)])[-1] == "cpu"
    return ["retrieval.embedder=packaged-minilm"] if is_cpu else []


def warm_start_overrides(overrides: Sequence[str]) -> list[str]:
    """The sample of `source=` is indexed as a preview's is."""
    return [*sample_embedder(overrides), *overrides]


def evaluate_overrides(overrides: Sequence[str]) -> list[str]:
    """With api=chat as `preview_overrides`: prompts, passages and limits are a capable model's."""
    return preview_overrides(overrides) if "api=chat" in overrides else list(overrides)


def key_variable(config: DictConfig) -> str:
    """The variable whose key the endpoint gets. Logs its name if it is set; raises TokenUnusable."""
    variable = str(config.endpoint_key)
    if bearer_of(variable):
        say("endpoint", f"requests to {config.endpoint} carry the key in {variable} (endpoint_key)")
    return variable


def base_of(address: str) -> str:
    """The address without the path of a request. A bare host gets the usual /v1."""
    base = address.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    return base if urlsplit(base).path.strip("/") else f"{base}/v1"


def served_names(base: str, key: str | None = None) -> list[str]:
    """The models a server lists. Raises PreflightFailed if it does not answer."""
    url, headers = f"{base}/models", bearer_headers(key)
    fix = "start it, or correct the address, such as http://127.0.0.1:8001/v1"
    try:
        response = httpx.get(url, timeout=_TIMEOUT_S, trust_env=not is_loopback(base), headers=headers)
        said = f"HTTP {response.status_code}: {words_of(response, key)}"
        if response.status_code in NOT_LET_IN:
            fix = f"set its key in {key}, or name another variable with endpoint_key="
        return [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
    except httpx.HTTPStatusError as error:
        raise refusal("endpoint", f"{url} lists no models ({said})", fix) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, OverflowError) as error:
        why = f"no OpenAI-compatible server answers at {url} ({type(error).__name__}: {error})"
        raise refusal("endpoint", why, fix) from error
    except (KeyError, TypeError, RecursionError) as error:
        why = f"{url} does not list models as an OpenAI-compatible server ({said})"
        raise refusal("endpoint", why, fix) from error


def served_name(base: str, wanted: str | None, key: str | None = None) -> str:
    """`wanted`, or the server's only model. Raises PreflightFailed if it has none, or several."""
    names = served_names(base, key)
    if wanted in names:
        return str(wanted)
    if wanted is not None or len(names) != 1:
        not_this = f", not {wanted}" if wanted else ""
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        why = f"the server at {base} has the models {shown or 'none'}{not_this}"
        raise refusal("endpoint_model", why, "choose one with endpoint_model=")
    return names[0]


def spent(conversation: Conversation) -> dict[str, Any]:
    """What a conversation took, for its journal's record."""
    tokens = {"tokens_in": conversation.tokens_in, "tokens_out": conversation.tokens_out}
    return tokens | {"latency_s": round(conversation.latency_s, 2)}


def costs(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summed tokens and seconds of these conversations."""
    return {
        "tokens_in": sum(record["tokens_in"] for record in records),
        "tokens_out": sum(record["tokens_out"] for record in records),
        # fsum gives the same sum in any order.
        "conversation_s": round(math.fsum(record["latency_s"] for record in records), 1),
    }


def usd(config: DictConfig, cost: Mapping[str, Any]) -> float | None:
    """The price of the tokens of `costs`. None unless both prices are set."""
    prices = config.usd_per_million_in, config.usd_per_million_out
    if None in prices:
        return None
    return float(cost["tokens_in"] * prices[0] + cost["tokens_out"] * prices[1]) / 1e6


def cost_line(cost: Mapping[str, Any], usd: float | None) -> str:
    """The tokens of `costs`, with their price if it is known."""
    price = "" if usd is None else f", ${usd:.2f}"
    return f"{cost['tokens_in']:,} tokens read, {cost['tokens_out']:,} written{price}"


def requests_report(endpoint: ChatEndpoint) -> dict[str, Any]:
    """How the endpoint's requests of this start went."""
    return {
        "requests": endpoint.requests,
        "failed_requests": endpoint.failures.total(),
        "failures": dict(endpoint.failures.most_common(3)),
        "answers_without_usage": endpoint.without_usage,
        "parameters_left_out": sorted(endpoint.left_out),
    }


def request_lines(report: Mapping[str, Any]) -> Sequence[str]:
    """The lines of `requests_report` that a reader should see."""
    lines = []
    if report["failed_requests"]:
        lines.append(
            f"{report['failed_requests']} of {report['requests']} requests failed and were repeated; their "
            "cost is not included"
        )
        lines += [f"{counted(times, 'request')} failed: {why}" for why, times in report["failures"].items()]
    if report["answers_without_usage"]:
        lines.append(f"{report['answers_without_usage']} answers did not report their tokens")
    if report["parameters_left_out"]:
        named = ", ".join(report["parameters_left_out"])
        lines.append(f"the model does not take {named}: requests went without")
    return lines
