"""Settings of every stage: where things live, the machine, the run and its data."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.key import MISSING, TRAINING, Number, key

_OF_QUESTIONS: dict[str, Any] = {"results": ("synthesize", "evaluate"), "journal": ("evaluate",)}


@dataclass
class Paths:
    """Where things live, locally or on a volume."""

    corpus: str = key("outputs/corpus", "Corpus, index, prompts and local models.")
    checkpoints: str = key("outputs/checkpoints", "One folder per run.")
    environments: str = key("environments", "Your own environments (docs/environments.md).")


@dataclass
class Machine:
    """The machine that hardware= describes. With compute=local, preflight judges memory for it."""

    gpu: str | None = key("H100", "GPU name, from drzero/recipe/gpu_prices.py; null for none.")
    gpus: int = key(8, "GPUs a stage uses per machine; on a CPU, training processes.", low=1)
    serve_gpus: Any = key(
        None,
        "GPUs of each machine that only sample while the others train, with mode=separate_async "
        "(docs/machines.md).",
        pattern=(r"None|\d+|\[(\d+(, \d+)*)?\]", "a number of GPUs or a list of their ids, or null"),
        pace=True,
    )
    nodes: int = key(1, "Machines; more than one form a Ray cluster (docs/scale.md).", low=1)
    ray_address: str | None = key(
        None,
        "Ray cluster to join, by its head's address; null starts a local Ray.",
        pattern=(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):\d{1,5}", "HOST:PORT"),
    )
    device: str = key("cuda", "torch device of models.", choices=("cuda", "cpu", "npu"))


@dataclass
class Compute:
    """Where stages run. The default is this machine, which is free unless `type` names a GPU."""

    provider: str = key("local", "Where stages run.", choices=("local", "modal"))
    hardware: str | None = key(None, "Profile to use when hardware= is not given; null detects GPUs.")
    type: str | None = key(None, "GPU type, by Modal's names; null for none.", pace=True)
    count: int | None = key(None, "GPUs.", low=0)
    cpu: int | float | None = key(None, "Physical cores.", above=0)
    memory: int | None = key(None, "Host memory in MiB.", low=1)
    timeout: int | None = key(None, "Seconds before the provider ends the call (Modal allows 86400).", low=1)
    region: str | None = key(None, "Where to run; null lets the provider choose.")
    retries: int = key(0, "Retries of a failed call by the provider.", low=0)
    max_usd: int | float | None = key(None, "Most dollars that a stage or loop may cost.", low=0)


@dataclass
class Run:
    """This run."""

    name: str = key(
        MISSING,
        "Name of the run's folder.",
        pattern=(
            r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
            "text of letters from A to Z, digits, '.', '_' and '-', not starting with '.' or '-'",
        ),
    )
    dir: str = key("${paths.checkpoints}/${run.name}", "The run's folder; the same folder resumes the run.")
    export_dir: str = key("${paths.checkpoints}/${run.name}_hf", "Export of the last checkpoint.")
    export_dtype: str = key(
        "float32",
        "Precision of the export. bfloat16 rounds away most of a small training step (docs/merge.md).",
        choices=("float32", "bfloat16"),
        results=("challenger", "synthesize", "merge"),
    )
    max_failed_share: Number = key(
        0.25, "Most rollouts of a step that failed services may spoil.", low=0, high=1
    )
    min_free_gb: Number = key(4, "Free GB at the start: about two checkpoints and an export.", low=0)


@dataclass
class QuestionFields:
    """Field names in question files (`benchmarks`, `gates.benchmarks`, `hold_out`).

    null takes the first usual name present (docs/evaluation.md).
    """

    question: str | None = key(None, "The question.", **_OF_QUESTIONS)
    answers: str | None = key(None, "Its answer, or a list of accepted ones.", **_OF_QUESTIONS)
    documents: str | None = key(None, "Ids of its documents, for hold_out.", **_OF_QUESTIONS)


@dataclass
class Data:
    """The part of veRL's `data` that stages without veRL read too."""

    train_files: Any = key(None, "Parquet file of prompts or questions.", run=True)
    seed: int = key(
        42,
        "Seed of data order, sampling and choices.",
        results=("challenger", "synthesize", "solver", "evaluate", "preview"),
        journal=("synthesize", "preview"),
    )
    max_prompt_length: int = key(1536, "Tokens of a prompt.", low=1, results=TRAINING)
    max_response_length: int = key(2560, "Tokens after the prompt.", low=1, results=TRAINING, pace=True)
