"""The lines that say what a start is doing are still written by the installed packages."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from drzero.stages.startup_signs import SGLANG, TRAINER, VLLM

# Where a sign's line is written; `{` stands for what is only known at run time.
WRITTEN_BY = {
    "Started a local Ray instance": ("ray", "_private/worker.py"),
    "Loading weights:": ("transformers", "core_model_loading.py", 'desc="Loading weights"'),
    "num_warmup_steps: ": ("verl", "workers/engine/fsdp/transformer_impl.py"),
    "SGLang http server: rollout_mode=": (
        "verl",
        "workers/rollout/sglang_rollout/async_sglang_server.py",
        "SGLang http server: {rollout_mode=}",
    ),
    "vLLMHttpServer, replica_rank:": (
        "verl",
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        'f"{self.__class__.__name__}, replica_rank: {self.replica_rank}',
    ),
    "Init torch distributed begin": ("sglang", "srt/model_executor/model_runner.py"),
    "Load weight begin": ("sglang", "srt/model_executor/model_runner.py"),
    "Loading safetensors checkpoint shards": ("sglang", "srt/model_loader/weight_utils.py"),
    "Multi-thread loading shards": ("sglang", "srt/model_loader/weight_utils.py"),
    "KV Cache is allocated": ("sglang", "srt/mem_cache/memory_pool.py"),
    "Capture cuda graph begin": (
        "sglang",
        "srt/model_executor/model_runner.py",
        "Capture {graph_backend[self.device]} begin",
    ),
    "Capturing batches (": ("sglang", "srt/model_executor/cuda_graph_runner.py"),
}


def test_every_sign_has_its_place():
    assert {*WRITTEN_BY, *VLLM} == TRAINER.keys()  # tests/compat/test_vllm_wheel.py has vLLM's own
    assert (SGLANG | VLLM).items() < TRAINER.items()


def written_in(package_root, sign):
    _, file, *text = WRITTEN_BY[sign]
    return (text or [sign])[0] in (package_root / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("sign", [sign for sign in WRITTEN_BY if sign not in SGLANG])
def test_verl_ray_or_transformers_writes_it(sign):
    spec = find_spec(WRITTEN_BY[sign][0])
    assert written_in(Path(spec.submodule_search_locations[0]), sign)


@pytest.mark.slow("reads SGLang, which the environment of the first tier lacks")
@pytest.mark.parametrize("sign", SGLANG)
def test_sglang_writes_it(sign, sglang_python):
    [package] = Path(sglang_python).parents[1].glob("lib/python*/site-packages/sglang")
    assert written_in(package, sign)
