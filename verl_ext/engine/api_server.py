"""The reference engine as an OpenAI-compatible server: the solver server on machines without SGLang.

    python -m verl_ext.engine.api_server --model PATH --port 8001 --device cpu --dtype float32

`POST /v1/completions` and `/v1/chat/completions`, complete or streamed, with vLLM's `token_ids` on request.
`POST /v1/responses` and Anthropic's `/v1/messages` too, whose streams come when the answer is complete.
`GET /health` answers 200 only if the engine has just produced a token. With OPENAI_API_KEY set, requests
below `/v1/` need it as their bearer token. An error in the engine's loop ends the process with status 1.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError
from setproctitle import setproctitle
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from drzero.ops.bearer import MODEL_KEY, bearer_headers
from drzero.ops.connections import server_config
from drzero.ops.disconnect import unless_gone
from drzero.ops.openai_http import GONE, RequestRefused, read_body, refusal, unknown_model
from environments.call import FORMS
from verl_ext.apis import messages, responses
from verl_ext.apis.turn import Asked, streamed
from verl_ext.engine.api_answers import Job, chat_job, completion_job
from verl_ext.engine.api_requests import ChatRequest, CompletionRequest
from verl_ext.engine.engine import EngineFailure, ReferenceEngine
from verl_ext.engine.loading import ModelLoadError, eos_token_ids, load_model
from verl_ext.engine.sampling import SamplingParams

BODY_BYTES, BODY_BYTES_PER_ID = 64 << 10, 64  # longest body, plus JSON per id of `max_seq_len`

_NEEDS_TOKEN = f"a bearer token is needed: the one in the server's {MODEL_KEY}"


def create_app(
    engine: ReferenceEngine, tokenizer: PreTrainedTokenizerBase, model_name: str, form: str = "auto"
) -> FastAPI:
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
    credentials = bearer_headers(MODEL_KEY).get("Authorization", "").encode()

    def check_token(request: Request) -> None:
        anthropic = request.headers.get("x-api-key")
        sent = f"Bearer {anthropic}" if anthropic else request.headers.get("Authorization", "")
        if credentials and not hmac.compare_digest(sent.encode(), credentials):
            raise RequestRefused(_NEEDS_TOKEN, code="invalid_api_key", status=401)

    def check_model(asked: str | None) -> None:
        if asked not in (None, model_name):
            advice = " (served_name= of `drzero serve-model` gives it another name)"
            raise unknown_model(str(asked), repr(model_name), advice)

    @app.exception_handler(RequestRefused)
    async def refuse(request: Request, refused: RequestRefused) -> Response:
        return refused.response()

    @app.exception_handler(EngineFailure)
    async def fail(request: Request, failure: EngineFailure) -> Response:
        return RequestRefused(str(failure), status=503).response()

    async def job_of(request: Request, make: Callable[[bytes], Job]) -> Job:
        """Raises ClientDisconnect amid its request."""
        check_token(request)
        content = await read_body(request, body_bytes)
        try:
            job = await asyncio.to_thread(make, content)  # long prompts take a while
        except ValidationError as error:
            raise refusal(error) from error
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        check_model(job.request.model)
        return job

    async def answer(request: Request, make: Callable[[bytes], Job]) -> Response:
        try:
            job = await job_of(request, make)
            if job.request.stream:
                return StreamingResponse(job.events(), media_type="text/event-stream")
            whole = await unless_gone(request.receive, job.whole())
        except ClientDisconnect:
            return Response(status_code=GONE)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        return Response(status_code=GONE) if whole is None else JSONResponse(whole)

    # pydantic also refuses deep nesting and lone surrogates, which Python's own parser accepts.
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        read = CompletionRequest.model_validate_json
        return await answer(request, lambda body: completion_job(engine, tokenizer, read(body), model_name))

    def chat(body: ChatRequest) -> Job:
        return chat_job(engine, tokenizer, body, model_name, form=form)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, lambda content: chat(ChatRequest.model_validate_json(content)))

    _add_other_apis(app, job_of, chat, model_name)
    entry = {"id": model_name, "object": "model", "created": 0, "owned_by": "local"}
    entry |= {"max_model_len": engine.max_seq_len}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check_token(request)
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        check_token(request)
        check_model(name)
        return JSONResponse(entry)

    @app.get("/health")
    async def health() -> Response:
        nonlocal tokens_at_last_check
        # Tokens generated since the last check prove as much as a canary, which would have to wait its turn.
        if engine.failure is not None or engine.stats().tokens_out == tokens_at_last_check:
            try:
                canary = engine.generate([0], SamplingParams(max_tokens=1, temperature=0))
                await asyncio.wait_for(canary, 30.0)
            except (EngineFailure, TimeoutError) as error:
                why = f"the engine produces no token: {error or type(error).__name__}"
                return RequestRefused(why, status=503).response()
        tokens_at_last_check = engine.stats().tokens_out
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


def _add_other_apis(
    app: FastAPI,
    job_of: Callable[[Request, Callable[[bytes], Job]], Awaitable[Job]],
    chat: Callable[[ChatRequest], Job],
    model: str,
) -> None:
    """The same turn in other words. `job_of` reads a request, and `chat` makes the job of its chat."""

    async def answer(request: Request, api: ModuleType) -> Response:
        bodies: list[Any] = []

        def job(content: bytes) -> Job:
            asked, body = api.read(content)
            bodies.append(body)
            return chat(_as_chat(asked, body.model))

        try:
            turn = (await job_of(request, job)).turn()
            (body,) = bodies
            if body.stream:
                events = streamed(turn, api, model, body)
                first = await anext(events)  # until something is sent, a refusal has its own status
                return StreamingResponse(_following(first, events), media_type="text/event-stream")
            told = await unless_gone(request.receive, turn)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except RequestRefused as refused:
            return JSONResponse(api.refused(refused), status_code=refused.status)
        return Response(status_code=GONE) if told is None else JSONResponse(api.whole(told, model, body))

    @app.post("/v1/responses")
    async def of_responses(request: Request) -> Response:
        return await answer(request, responses)

    @app.post("/v1/messages")
    async def of_messages(request: Request) -> Response:
        return await answer(request, messages)


def _as_chat(asked: Asked, model: str | None) -> ChatRequest:
    chat = {"messages": asked.messages, "tools": asked.tools, "max_tokens": asked.max_tokens}
    return ChatRequest.model_validate_json(json.dumps({**chat, "model": model, **asked.sampling}))


async def _following(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


class EngineCollector(Collector):
    """The engine's counters for Prometheus."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield one family per counter or gauge."""
        stats = self._engine.stats()
        counters = {
            "requests": ("Requests taken into the batch", stats.requests),
            "prompt_tokens": ("Prompt tokens taken in", stats.tokens_in),
            "generated_tokens": ("Tokens generated", stats.tokens_out),
            "prefix_tokens_reused": ("Prompt tokens copied, not computed", stats.prefix_tokens_reused),
            "decode_steps": ("Decode forwards", stats.decode_steps),
        }
        gauges = {
            "batch_size": ("Sequences decoding now", stats.running),
            "queue_depth": ("Requests waiting for a slot", stats.waiting),
            "prefix_cache_bytes": ("Bytes of kept prefixes", stats.prefix_cache_bytes),
        }
        yield from (CounterMetricFamily(f"engine_{name}", *one) for name, one in counters.items())
        yield from (GaugeMetricFamily(f"engine_{name}", *one) for name, one in gauges.items())


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal. Exits with 2 for a bad port or model. Raises EngineFailure after a crash."""
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
    parser.add_argument("--call-form", default="auto", choices=("auto", *FORMS), help="of tool calls")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # Bind before the model is loaded, which takes long.
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        place, cause = f"{options.host}:{options.port}", os.strerror(error.errno or 0)
        parser.exit(2, f"solver server: cannot listen on {place}: {cause}. Choose another with --port.\n")
    setproctitle("drzero: solver")
    torch.set_num_threads(options.threads)
    try:
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    except ModelLoadError as error:
        parser.exit(2, f"solver server: {error}\n")
    engine = ReferenceEngine(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        seed=options.seed,
    )
    app = create_app(engine, tokenizer, options.served_model_name or options.model, options.call_form)
    host, port = listener.getsockname()[:2]
    print(f"solver server: listening on http://{host}:{port}", flush=True)
    server = uvicorn.Server(server_config(app))
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
