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
        "full for capable instruction models; short for a small model warm-started on that wording.",
        choices=("full", "short"),
        results=CONVERSING,
        journal=("evaluate", "preview"),
    )


@dataclass
class Rollout:
    """One rollout of the policy. veRL's own keys take their values from here."""

    temperature: Number = key(1.0, "Sampling temperature.", above=0, results=TRAINING)
    max_turns: int = key(5, "Assistant turns.", low=1, results=("challenger", "synthesize", "solver"))
    max_tokens_per_turn: int = key(1024, "Tokens per assistant turn.", low=1, results=TRAINING)
    server_args: dict[str, Any] = key({}, "More engine arguments (docs/sglang.md).", results=TRAINING)


@dataclass
class Solver:
    """The solver that answers the challenger's questions; in synthesize and evaluate, the served model."""

    model_path: str = key(
        "${previous_solver:${paths.checkpoints},${iteration},${base_model}}",
        "Its weights: the last iteration's export, or the base model.",
    )
    engine: str = key(
        "sglang",
        "sglang, vllm, or reference (our own engine, for a CPU or one small GPU). rollout= sets it.",
        choices=("sglang", "vllm", "reference"),
        **_SHARED,
    )
    host: str = key("127.0.0.1", "Address to bind.")
    port: int | None = key(None, "Port; null takes 8001, or any free port.", low=1024, high=65535)
    tp_size: int = key(1, "GPUs per copy of the solver, and of the rollout engine.", low=1)
    dp_size: int = key("${copies:${machine.gpus},${solver.tp_size}}", "Copies of the solver.", low=1)
    mem_fraction_static: Number = key(0.25, "Share of each GPU for the solver.", above=0, high=1)
    max_batch_size: int = key(32, "Sequences decoded at once (reference engine, or SGLang on a CPU).", low=1)
    threads: int = key(1, "torch threads of the server on a CPU.", low=1)
    dtype: str = key("bfloat16", "Precision the solver computes in.", choices=FLOATS, **_SHARED)
    attempts: int = key(
        5,
        "Attempts per question (n).",
        low=2,  # with one, no question would be solved sometimes but not always
        results=("challenger", "preview"),
        journal=("preview",),
    )
    temperature: Number = key(1.0, "Sampling temperature of an attempt.", low=0, **_SHARED)
    max_turns: int = key("${rollout.max_turns}", "Assistant turns of an attempt.", low=1, **_SHARED)
    max_tokens_per_turn: int = key(
        "${rollout.max_tokens_per_turn}", "Tokens per assistant turn.", low=1, **_SHARED
    )
    max_context_tokens: int = key(
        "${add:${data.max_prompt_length},${data.max_response_length}}",
        "Tokens of an attempt, prompt and response together.",
        low=1,
        **_SHARED,
    )
    server_args: dict[str, Any] = key({}, "More server arguments (docs/sglang.md).", **_SHARED)
    concurrency: int = key(256, "Attempts in flight.", low=1)
    deadline_s: Number = key(600, "Seconds before an attempt counts as failed (not as wrong).", above=0)
    startup_budget_s: Number = key(900, "Seconds to wait for a healthy server.", above=0)
    restarts: int = key(0, "Restarts in a row. Loading takes longer than a deadline.", low=0)
