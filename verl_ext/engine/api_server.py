"""The reference engine as a small OpenAI-compatible server: the solver server on machines without SGLang.

    python -m verl_ext.engine.api_server --model PATH --port 8001 --device cpu --dtype float32

`POST /v1/completions` takes a text or token-id prompt and answers in OpenAI's shape, with vLLM's `token_ids`
on request. `GET /health` answers 200 only when the engine has just produced a token. A request whose client
disconnects is cancelled. Unsupported options (streaming, penalties) are refused with a 400 that names them,
a body far longer than the engine's sequences with a 413, before it has all arrived. If the engine's loop
ends by an error, so does the process, with that error and status 1: a supervisor can then restart it.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, ValidationError
from setproctitle import setproctitle
from transformers import PreTrainedTokenizerBase

from verl_ext.engine.engine import EngineFailure, ReferenceEngine
from verl_ext.engine.loading import ModelLoadError, eos_token_ids, load_model
from verl_ext.engine.sampling import SamplingParams
from verl_ext.engine.sequence import Generation

BODY_BYTES, BODY_BYTES_PER_ID = 64 << 10, 64
"""The longest body: this, and for each id of the engine's `max_seq_len` more than its text takes as JSON."""


class CompletionRequest(BaseModel):
    """The supported fields of OpenAI's completions, vLLM's and SGLang's included; others are refused."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    user: str | None = None
    n: Literal[1] = 1
    stream: Literal[False] = False
    echo: Literal[False] = False

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def create_app(engine: ReferenceEngine, tokenizer: PreTrainedTokenizerBase, model_name: str) -> FastAPI:
    """The HTTP application around `engine`, which it closes at shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="reference engine", lifespan=lifespan)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    tokens_at_last_check = 0

    body_bytes = BODY_BYTES + BODY_BYTES_PER_ID * engine.max_seq_len

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > body_bytes:
                return _error(413, f"the body is longer than {body_bytes} bytes: the prompt cannot fit")
        try:
            # From JSON, which also refuses what Python's own parser lets pass: deep nesting, lone surrogates.
            body = CompletionRequest.model_validate_json(bytes(content))
        except ValidationError as error:
            return _error(400, _first_of(error))
        try:
            params = SamplingParams(**body.model_dump(include={*SamplingParams.__dataclass_fields__}))
            given = body.prompt
            # In a thread: the longest take a while.
            prompt = await asyncio.to_thread(tokenizer.encode, given) if isinstance(given, str) else given
            generating = engine.generate(prompt, params, _stop_checker(tokenizer, body.stop_strings))
            generation = await _until_disconnect(request, generating)
        except ValueError as error:
            return _error(400, str(error))
        except EngineFailure as error:
            return _error(503, str(error))
        if generation is None:
            return Response(status_code=499)  # as nginx has it: the client closed the request
        tokens_in, tokens_out = len(prompt), len(generation.token_ids)
        usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
        return JSONResponse(
            {
                "id": f"cmpl-{uuid.uuid4().hex}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": model_name,
                "choices": [_choice(body, generation, tokenizer)],
                "usage": usage | {"total_tokens": tokens_in + tokens_out},
            }
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model_name, "object": "model", "owned_by": "local"}
        return {"object": "list", "data": [entry | {"max_model_len": engine.max_seq_len}]}

    @app.get("/health")
    async def health() -> Response:
        nonlocal tokens_at_last_check
        # Tokens generated since the last check prove as much as a canary, which would have to wait its turn.
        if engine.failure is not None or engine.stats().tokens_out == tokens_at_last_check:
            try:
                canary = engine.generate([0], SamplingParams(max_tokens=1, temperature=0))
                await asyncio.wait_for(canary, 30.0)
            except (EngineFailure, TimeoutError) as error:
                return _error(503, f"the engine produces no token: {error or type(error).__name__}")
        tokens_at_last_check = engine.stats().tokens_out
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


class EngineCollector(Collector):
    """The engine's counters for Prometheus, read when scraped."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield one family per counter or gauge."""
        stats = self._engine.stats()
        copied = "Prompt tokens copied instead of computed"
        yield CounterMetricFamily("engine_requests", "Requests taken into the batch", stats.requests)
        yield CounterMetricFamily("engine_prompt_tokens", "Prompt tokens taken in", stats.tokens_in)
        yield CounterMetricFamily("engine_generated_tokens", "Tokens generated", stats.tokens_out)
        yield CounterMetricFamily("engine_prefix_tokens_reused", copied, stats.prefix_tokens_reused)
        yield CounterMetricFamily("engine_decode_steps", "Decode forwards", stats.decode_steps)
        yield GaugeMetricFamily("engine_batch_size", "Sequences decoding now", stats.running)
        yield GaugeMetricFamily("engine_queue_depth", "Requests waiting for a slot", stats.waiting)
        kept = stats.prefix_cache_bytes
        yield GaugeMetricFamily("engine_prefix_cache_bytes", "Bytes of kept prefixes", kept)


def _first_of(error: ValidationError) -> str:
    """The first thing that is wrong with a request, and where."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"


async def _until_disconnect(request: Request, generating: Any) -> Generation | None:
    """The generation; None, with the request cancelled, if the client disconnects first."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    generation, gone = asyncio.ensure_future(generating), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({generation, gone}, return_when=asyncio.FIRST_COMPLETED)
        return generation.result() if generation.done() else None
    finally:
        generation.cancel()
        gone.cancel()


def _stop_checker(tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> Callable[[list[int]], bool] | None:
    """A check whether a stop string has just appeared; None without stop strings."""
    if not stops:
        return None
    # A new match ends in the newest id, and an id stands for at least one byte: these ids hold all of it.
    window = max(len(stop.encode()) for stop in stops) + 1

    def stopped(token_ids: list[int]) -> bool:
        text = _decode(tokenizer, token_ids[-window:])
        return any(stop in text for stop in stops)

    return stopped


def _choice(
    body: CompletionRequest, generation: Generation, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The response; its text ends before (with `no_stop_trim`: with) the stop string or id that ended it."""
    ids = generation.token_ids
    text = _decode(tokenizer, ids, body.skip_special_tokens)
    if generation.finish_reason == "stop" and not body.no_stop_trim:
        ends = [text.find(stop) for stop in body.stop_strings if stop in text]
        text = text[: min(ends)] if ends else _decode(tokenizer, ids[:-1], body.skip_special_tokens)
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "finish_reason": generation.finish_reason,
        "logprobs": None,
    }
    if body.logprobs is not None:
        tokens = [_decode(tokenizer, [token_id]) for token_id in ids]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": generation.log_probs}
    return choice | {"token_ids": ids} if body.return_token_ids else choice


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special_tokens: bool = False) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


def _exit(message: str) -> None:
    print(f"solver server: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal; exits with status 2 for a taken port or a model that does not load.

    Raises EngineFailure when the engine has ended by an error.
    """
    parser = argparse.ArgumentParser(prog="python -m verl_ext.engine.api_server", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0 picks a free one and prints it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 1 is best on busy cores")
    parser.add_argument("--max-batch-size", type=int, default=32, help="sequences decoded together")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="prompt plus response, in tokens")
    parser.add_argument("--served-model-name", help="default: the model's path")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # Bound before the model is loaded, which takes long.
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        place, cause = f"{options.host}:{options.port}", os.strerror(error.errno or 0)
        _exit(f"cannot listen on {place}: {cause}. Choose another with --port.")
    setproctitle("drzero: solver")
    torch.set_num_threads(options.threads)
    try:
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    except ModelLoadError as error:
        _exit(str(error))
    engine = ReferenceEngine(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        seed=options.seed,
    )
    app = create_app(engine, tokenizer, options.served_model_name or options.model)
    host, port = listener.getsockname()[:2]
    print(f"solver server: listening on http://{host}:{port}", flush=True)
    # The run's own level; at INFO uvicorn would log every request.
    level = "debug" if os.environ.get("DRZERO_LOG_LEVEL") == "DEBUG" else "warning"
    server = uvicorn.Server(uvicorn.Config(app, log_level=level))
    crashed = threading.Event()

    def end() -> None:
        crashed.set()
        server.should_exit = True

    engine.on_crash = end
    server.run(sockets=[listener])
    if crashed.is_set():
        raise EngineFailure(f"the engine's loop has ended: {engine.failure!r}") from engine.failure


if __name__ == "__main__":
    main()
