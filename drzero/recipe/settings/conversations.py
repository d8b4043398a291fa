"""How models converse: the wording of prompts, the policy's rollouts, and the served solver."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.key import CONVERSING, FLOATS, SAMPLING, SERVING, TRAINING, Number, key

_SHARED = {"results": SERVING, "journal": SAMPLING}


@dataclass
class Prompts:
    """How prompts are worded."""

    form: str = key(
        "full",
        "full for capable instruction models, short for a small model warm-started on exactly those words.",
        choices=("full", "short"),
        results=CONVERSING,
        journal=("evaluate", "preview"),
    )


@dataclass
class Rollout:
    """One rollout of the policy; veRL's keys for the same take their values from here."""

    temperature: Number = key(1.0, "Sampling temperature of a rollout.", above=0, results=TRAINING)
    max_turns: int = key(
        5, "Assistant turns of a rollout.", low=1, results=("challenger", "synthesize", "solver")
    )
    max_tokens_per_turn: int = key(
        1024,
        "Tokens of one assistant turn, so that a first turn cannot use up the whole response.",
        low=1,
        results=TRAINING,
    )
    server_args: dict[str, Any] = key(
        {},
        "Further arguments of the rollout engine, by SGLang's own names (kv_cache_dtype=fp8_e5m2); preflight "
        "checks them by the pinned version's table. They join actor_rollout_ref.rollout.engine_kwargs.",
        results=TRAINING,
    )


@dataclass
class Solver:
    """The solver that answers the challenger's questions; in synthesize and evaluate, the served model."""

    model_path: str = key(
        "${solver_export:${paths.checkpoints},${add:${iteration},-1},${base_model}}",
        "Its weights: the last iteration's merged export, at first the base model.",
    )
    engine: str = key(
        "sglang",
        "Server: sglang, or reference (our own engine, on a CPU or one small GPU); rollout= sets it.",
        choices=("sglang", "reference"),
        **_SHARED,
    )
    host: str = key("127.0.0.1", "Address to bind.")
    port: int | None = key(
        None, "Port; null takes 8001 when it is free, else any free one.", low=1024, high=65535
    )
    tp_size: int = key(
        1, "GPUs per copy of the solver (SGLang's --tp-size), and of the rollout engine.", low=1
    )
    dp_size: int = key(
        "${copies:${machine.gpus},${solver.tp_size}}",
        "Copies of the solver (SGLang's --dp-size): as many as the GPUs of a machine hold.",
        low=1,
    )
    mem_fraction_static: Number = key(
        0.25,
        "Share of each GPU for the solver's weights and cache; the actor and the rollout engine have the "
        "rest.",
        above=0,
        high=1,
    )
    max_batch_size: int = key(
        32, "Sequences that the server decodes at once: the reference engine's, or SGLang's on a CPU.", low=1
    )
    threads: int = key(1, "torch threads of the server on a CPU.", low=1)
    dtype: str = key("bfloat16", "Numbers the solver computes with.", choices=FLOATS, **_SHARED)
    attempts: int = key(
        5,
        "Attempts per question (n). With one, no question would be solved sometimes but not always.",
        low=2,
        results=("challenger", "preview"),
        journal=("preview",),
    )
    temperature: Number = key(1.0, "Sampling temperature of an attempt.", low=0, **_SHARED)
    max_turns: int = key(
        "${rollout.max_turns}", "Assistant turns of an attempt: as many as are trained.", low=1, **_SHARED
    )
    max_tokens_per_turn: int = key(
        "${rollout.max_tokens_per_turn}", "Tokens of one assistant turn, as in training.", low=1, **_SHARED
    )
    max_context_tokens: int = key(
        "${add:${data.max_prompt_length},${data.max_response_length}}",
        "Prompt and response tokens of an attempt together: training limits each, a server their sum, so "
        "what a short prompt leaves over is the response's.",
        low=1,
        **_SHARED,
    )
    server_args: dict[str, Any] = key(
        {},
        "Further arguments of its server, by SGLang's own names (kv_cache_dtype=fp8_e5m2), and those that "
        "the recipe sets without a key (attention_backend); preflight checks them by the pinned version's "
        "table.",
        **_SHARED,
    )
    concurrency: int = key(256, "Attempts in flight; the rest wait.", low=1)
    deadline_s: Number = key(600, "Seconds before an attempt counts as failed (not as wrong).", above=0)
    startup_budget_s: Number = key(900, "Seconds to wait for a healthy server.", above=0)
    restarts: int = key(
        0,
        "How often in a row it is restarted when it crashes or hangs. Not at all by default: loading takes "
        "longer than an attempt's deadline, and a solver that runs out of memory once does so again.",
        low=0,
    )
