"""What every stage has: where things live, the machine it is for, the run, its data."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.key import MISSING, TRAINING, Number, key

_OF_QUESTIONS: dict[str, Any] = {"results": ("synthesize", "evaluate"), "journal": ("evaluate",)}


@dataclass
class Paths:
    """Where things live, locally and (with other roots) on a volume."""

    corpus: str = key("outputs/corpus", "Corpus, index, prompts and local model folders.")
    checkpoints: str = key(
        "outputs/checkpoints", "One folder per run: checkpoints, export, dumps, logs, metrics."
    )
    environments: str = key(
        "environments", "Your own environments, a folder or a file each (docs/environments.md)."
    )


@dataclass
class Machine:
    """The machine that hardware= is written for; with compute=local, preflight judges memory for it."""

    gpu: str | None = key(
        "H100", "Its GPU, by a name in drzero/recipe/rates.py; null for a machine without one."
    )
    gpus: int = key(8, "GPUs per machine that a stage uses; on a CPU, training processes.", low=1)
    nodes: int = key(1, "Machines; more than one are a Ray cluster (ray_address, docs/scale.md).", low=1)
    ray_address: str | None = key(
        None,
        "The Ray cluster that a training joins, by the head's address as the other nodes have it; null "
        "starts a Ray of its own, on this machine alone.",
        pattern=(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):\d{1,5}", "HOST:PORT"),
    )
    device: str = key("cuda", "torch device of models: cuda, or cpu.", choices=("cuda", "cpu", "npu"))


@dataclass
class Compute:
    """The machine at hand by default, whatever hardware= says it is; it is free unless type names a GPU."""

    provider: str = key("local", "Where stages run.", choices=("local", "modal"))
    hardware: str | None = key(
        None, "The hardware profile that fits, where hardware= is not given; null reads this machine's GPUs."
    )
    type: str | None = key(
        None,
        "GPU type by Modal's names (recipe/rates.py); null for none, or on a machine that costs nothing.",
        pace=True,
    )
    count: int | None = key(None, "GPUs.", low=0)
    cpu: int | float | None = key(None, "Physical cores.", above=0)
    memory: int | None = key(None, "Host memory in MiB.", low=1)
    timeout: int | None = key(
        None, "Seconds after which the provider ends the call; Modal's own limit is 86400.", low=1
    )
    region: str | None = key(None, "Where to run; null leaves it to the provider.")
    retries: int = key(0, "How often the provider retries a failed call.", low=0)
    max_usd: int | float | None = key(
        None,
        "US dollars that one start, of a stage or of a loop, may cost by the estimate; above it preflight "
        "refuses. null sets no limit.",
        low=0,
    )


@dataclass
class Run:
    """This run."""

    name: str = key(
        MISSING,
        "Names the run's folder.",
        pattern=(
            r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
            "text of letters from A to Z, digits, '.', '_' and '-', beginning with none of '.' and '-'",
        ),
    )
    dir: str = key(
        "${paths.checkpoints}/${run.name}", "The run's folder; rerunning with the same one resumes."
    )
    export_dir: str = key(
        "${paths.checkpoints}/${run.name}_hf",
        "Where its last checkpoint goes as one model folder, for Transformers and any inference server.",
    )
    export_dtype: str = key(
        "float32",
        "Numbers of that folder's weights. The next solver starts from it, and bfloat16, at half the size, "
        "rounds most of a small training step away (docs/merge.md).",
        choices=("float32", "bfloat16"),
        results=("challenger", "synthesize", "merge"),
    )
    max_failed_share: Number = key(
        0.25,
        "A step stops when more than this share of its rollouts is spoiled by failed services: the rest "
        "would be a biased sample.",
        low=0,
        high=1,
    )
    min_free_gb: Number = key(
        4,
        "Free space in GB that the file system of the run's folder must have at the start: about two "
        "checkpoints and an export. 4 is right for a model of 135M parameters; float32 weights with Adam's "
        "states are 12 bytes a parameter.",
        low=0,
    )


@dataclass
class QuestionFields:
    """Which fields of question files are what (`benchmarks`, `gates.benchmarks`, `hold_out`).

    null is the first that is there of the usual names, which docs/evaluation.md lists.
    """

    question: str | None = key(None, "The question.", **_OF_QUESTIONS)
    answers: str | None = key(None, "Its answer, or a list of accepted ones.", **_OF_QUESTIONS)
    documents: str | None = key(
        None,
        "The ids of the documents that it is about, which hold_out keeps out of prompts.",
        **_OF_QUESTIONS,
    )


@dataclass
class Data:
    """The part of veRL's `data` that stages without veRL read as well."""

    train_files: Any = key(
        None, "The parquet file of prompts: the challenger's, or the solver's questions.", run=True
    )
    seed: int = key(
        42,
        "Seed of the order of the data, of sampling and of choices: the same seed gives the same order, in "
        "one run or in several resumed ones.",
        results=("challenger", "synthesize", "solver", "evaluate", "preview"),
        journal=("synthesize", "preview"),
    )
    max_prompt_length: int = key(1536, "Tokens of a prompt, at most.", low=1, results=TRAINING)
    max_response_length: int = key(
        2560,
        "Tokens of a conversation after its prompt, at most.",
        low=1,
        results=TRAINING,
        pace=True,
    )
