"""The CPU half of the smoke test: everything that would fail the GPU half and can be checked without a GPU.

    python -m drzero.launch.image.container_check gpu     # in the image gpu, or cpu

Prints a line each, secrets without their values. Exit code 1 if anything is wrong.
"""

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

from drzero.launch.image.check import main as check_versions
from drzero.launch.image.cuda_stand_in import load_stand_in
from drzero.launch.secrets import NAMED
from drzero.launch.volumes import MOUNTS, place

_LIBRARIES = ("verl", "torch", "transformers", "ray", "chromadb", "sentence_transformers", "hydra", "wandb")
_OURS = (
    "verl_ext.plugin",
    "verl_ext.trainer.trainers",
    "verl_ext.rewards",
    "verl_ext.sglang.compat",
    "search.server",
    "drzero.stages.training",
    "data.parquet_io",
    "drzero.ops.services.services",
)
_OF_GPU_IMAGE = (
    "sglang.srt.entrypoints.http_server",
    "verl.workers.rollout.sglang_rollout.async_sglang_server",
)
_STAGES = ("prepare_data", "challenger", "synthesize", "solver", "merge", "evaluate")


def main(image: str) -> int:
    """Returns 1 if a check failed."""
    # Prints its own lines.
    failed = int(bool(check_versions(["--installed", image])))
    for problem, line in _results(image):
        failed += problem
        print(f"{'ERROR' if problem else 'ok':<6}{line}", flush=True)
    print(f"container check: {f'{failed} of them failed' if failed else 'nothing wrong'}")
    return 1 if failed else 0


def _results(image: str) -> Iterator[tuple[bool, str]]:
    from drzero.recipe.compose import compose_stage

    yield from map(_import, (*_LIBRARIES, *_OURS))
    if image == "gpu":
        problem = _problem(load_stand_in)
        yield problem is not None, f"libcuda.so.1, or a stand-in{f': {problem}' if problem else ''}"
        if find_spec("flash_attn_2_cuda"):
            yield _import("flash_attn")
        yield from map(_import, _OF_GPU_IMAGE)
    for stage in _STAGES:
        for compute in ("8xh100", "cpu"):
            overrides = [f"compute={compute}", f"paths.corpus={place('corpus')}"]
            problem = _problem(partial(compose_stage, stage, overrides))
            yield problem is not None, f"config of {stage} for {compute}{f': {problem}' if problem else ''}"
    for kind in MOUNTS:
        probe = place(kind) / f".probe-{uuid.uuid4().hex}"
        try:
            probe.write_text("x", encoding="utf-8")
            probe.unlink()
        except OSError as error:
            yield True, f"volume {MOUNTS[kind]}: cannot be written to: {error.strerror}"
        else:
            yield False, f"volume {MOUNTS[kind]} can be written to"
    for secret, key in NAMED.items():
        yield False, f"{key} is {'set' if os.environ.get(key) else f'not set ({secret} or .env would)'}"


def _import(name: str) -> tuple[bool, str]:
    problem = _problem(partial(importlib.import_module, name))
    return problem is not None, f"import {name}{f': {problem}' if problem else ''}"


def _problem(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    # An import may raise anything.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
