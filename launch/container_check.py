"""The CPU half of the smoke test: whatever would make the GPU half fail and can be known without a GPU.

    python -m launch.container_check gpu     # which image it runs in: gpu or cpu

Imports, versions against the pins and SGLang against what a run needs of it, every stage's config, write
access to the volumes, and which secrets are there (never what they hold). One line each; exit code 1 when
something is wrong. The image for GPUs is checked on a machine without one.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial

from launch.image_check import main as judge_installed
from launch.secrets import NAMED
from launch.volumes import MOUNTS, place

_MODULES = (
    *("verl", "torch", "transformers", "ray", "chromadb", "sentence_transformers", "hydra", "wandb"),
    *("verl_ext.plugin", "verl_ext.trainers", "verl_ext.rewards", "verl_ext.sglang_compat"),
    *("search.server", "pipeline.challenger", "data.parquet_io", "ops.services"),
)
_STAGES = ("prepare_data", "challenger", "synthesize", "solver", "merge", "evaluate")


def main(image: str) -> int:
    """Print every finding; 1 when one is bad."""
    # Prints its own table, with what SGLang lacks.
    bad = int(bool(judge_installed(["--installed", image])))
    for check in (_imports, _configs, _volumes, _secrets):
        for problem, line in check():
            bad += problem
            print(f"{'ERROR' if problem else 'ok':<6}{line}", flush=True)
    print(f"container check: {f'{bad} of them failed' if bad else 'nothing wrong'}")
    return 1 if bad else 0


Findings = Iterator[tuple[bool, str]]


def _imports() -> Findings:
    for name in _MODULES:
        problem = _problem(partial(importlib.import_module, name))
        yield problem is not None, f"import {name}{f': {problem}' if problem else ''}"


def _configs() -> Findings:
    from pipeline.compose import compose_stage

    for stage in _STAGES:
        for compute in ("8xh100", "cpu"):
            overrides = [f"compute={compute}", f"paths.corpus={place('corpus')}"]
            problem = _problem(partial(compose_stage, stage, overrides))
            yield problem is not None, f"config of {stage} for {compute}{f': {problem}' if problem else ''}"


def _volumes() -> Findings:
    for kind in MOUNTS:
        probe = place(kind) / f".probe-{uuid.uuid4().hex}"
        try:
            probe.write_text("x", encoding="utf-8")
            probe.unlink()
        except OSError as error:
            yield True, f"volume {MOUNTS[kind]}: cannot be written to: {error.strerror}"
        else:
            yield False, f"volume {MOUNTS[kind]} can be written to"


def _secrets() -> Findings:
    for name, key in NAMED.items():
        yield False, f"{key} is {'set' if os.environ.get(key) else f'not set ({name} or .env would)'}"


def _problem(attempt: Callable[[], object]) -> str | None:
    """What goes wrong, in a line; any exception, since whatever an import raises is a finding here."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
