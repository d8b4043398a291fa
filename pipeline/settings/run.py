"""What every stage has: where things live, the run, the machine, the models' iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.settings.key import Number, key

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass
class Paths:
    """Where things live, locally and (with other roots) on a volume."""

    corpus: str = key("outputs/corpus", "Corpus, index, prompts and local model folders.")
    checkpoints: str = key(
        "outputs/checkpoints", "One folder per run: checkpoints, export, dumps, logs, metrics."
    )


@dataclass
class Machine:
    """The machine that hardware= is written for; with compute=local, preflight judges memory for it."""

    gpu: str | None = key("H100", "Its GPU, by a name in pipeline/rates.py; null for a machine without one.")
    gpus: int = key(8, "GPUs per machine that a stage uses; on a CPU, training processes.", low=1)
    nodes: int = key(1, "Machines.", low=1)
    device: str = key("cuda", "torch device of models: cuda, or cpu.", choices=("cuda", "cpu", "npu"))


@dataclass
class Run:
    """This run."""

    name: str = key(MISSING, "Names the run's folder.")
    dir: str = key(
        "${paths.checkpoints}/${run.name}", "The run's folder; rerunning with the same one resumes."
    )
    export_dir: str = key(
        "${paths.checkpoints}/${run.name}_hf",
        "Where its last checkpoint goes as one model folder (bfloat16), for Transformers and any inference "
        "server.",
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
class Data:
    """The part of veRL's `data` that stages without veRL read as well."""

    train_files: Any = key(
        None, "The parquet file of prompts: the challenger's, or the solver's questions.", run=True
    )
    seed: int = key(
        42,
        "Seed of the order of the data, of sampling and of choices: the same seed gives the same order, in "
        "one run or in several resumed ones.",
        results=("challenger", "synthesize", "solver", "evaluate"),
        journal=("synthesize",),
    )
    max_prompt_length: int = key(
        1536, "Tokens of a prompt, at most.", low=1, results=("challenger", "solver")
    )
    max_response_length: int = key(
        2560,
        "Tokens of a conversation after its prompt, at most.",
        low=1,
        results=("challenger", "solver"),
        pace=True,
    )
