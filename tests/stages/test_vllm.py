"""vLLM as the engine: what is started, which memory it is counted with, and how its parts are recognised."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import verl

from drzero.preflight.machine import declared_machine
from drzero.preflight.memory_ledger import serving_ledger, training_ledger, weights_backup_gib
from drzero.preflight.model_shape import load_shape
from drzero.preflight.versions import _LEAST_VLLM
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import add_call_form, solver_spec
from drzero.stages.startup_signs import VLLM
from drzero.stages.training import trainer_env
from drzero.stages.watch import LANDMARKS

ON_GPUS = ["hardware=8xh100", "rollout=vllm", "model=qwen2.5-3b"]


def composed(stage, *words):
    return resolve(compose_stage(stage, [*ON_GPUS, *words]))


def test_one_word_makes_it_the_engine_of_rollouts_and_of_the_served_model():
    config = composed("challenger")
    assert (config.actor_rollout_ref.rollout.name, config.solver.engine) == ("vllm", "vllm")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}


def test_its_server_is_started_by_its_own_options_and_reports_to_nobody(tiny_model, tmp_path):
    config = compose_stage("serve_model", [*ON_GPUS[:2], f"model={tiny_model}", "solver.dp_size=2"])
    add_call_form(config, "hermes")
    spec = solver_spec(resolve(config), "model", "mine")
    module, *options = spec.command[2:]
    assert module == "vllm.entrypoints.openai.api_server" and "--enable-auto-tool-choice" in options
    words = (
        f"--model {tiny_model} --dtype bfloat16 --data-parallel-size 2 --gpu-memory-utilization 0.8 "
        f"--max-model-len {config.solver.max_context_tokens} --tool-call-parser hermes "
        "--served-model-name mine --host 127.0.0.1 --port 8080"
    ).split()
    assert dict(zip(words[::2], words[1::2], strict=True)).items() <= dict(pairwise(options)).items()
    watched = spec.liveness.url, spec.liveness.work, spec.startup_signs
    assert watched == ("http://127.0.0.1:8080/health", ("vllm:generation_tokens_total",), VLLM)
    trainer = trainer_env(composed("solver", f"run.dir={tmp_path}"), tmp_path)
    assert spec.env["VLLM_NO_USAGE_STATS"] == trainer["VLLM_NO_USAGE_STATS"] == "1"


def test_its_share_is_of_the_whole_gpu_and_only_an_adapters_weights_wait_in_host_memory():
    config, shape = composed("solver"), load_shape("Qwen/Qwen2.5-3B-Instruct")
    machine = declared_machine(config, starting=False)
    ledger = training_ledger(config, machine, shape, shape)
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    assert ledger.phases["rollout"]["rollout engine: share"] == pytest.approx(share * machine.gpu.memory_gib)
    assert ledger.phases["update"]["rollout engine: asleep"] > 0 and "weight sync" in ledger.phases
    served = composed("serve_model")
    items = serving_ledger(served, machine, shape).phases["serving"]
    assert items["solver: share"] == pytest.approx(0.8 * machine.gpu.memory_gib)
    assert weights_backup_gib(config, shape, 8) == 0
    adapter = [f"actor_rollout_ref.model.{word}" for word in ("lora_rank=8", "lora.merge=false")]
    assert weights_backup_gib(composed("solver", *adapter), shape, 8) > 0


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::vLLMHttpServer.generate", "rollout engine"),
        ("VLLM::EngineCore", "vLLM of {component}"),
        ("VLLM::Worker_TP1", "vLLM of {component}"),
    ],
)
def test_its_processes_are_recognised(title, role):
    assert next(name for pattern, name in LANDMARKS.roles if re.search(pattern, title)) == role
    assert re.search(LANDMARKS.engines, title)


def test_verl_still_supports_the_version_that_preflight_asks_for():
    text = (Path(verl.__file__).parent / "third_party" / "vllm" / "__init__.py").read_text()
    assert f'vs.parse("{_LEAST_VLLM}")' in text and f"versions are {_LEAST_VLLM}+" in text
