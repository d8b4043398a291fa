"""The path of 8×H100, built by veRL's, torch's and SGLang's own code on eight fake GPUs.

One process per model (`gpu_actor.py`, `gpu_engines.py`), for models that take different paths: tied weights,
the usual ones, engines over four GPUs, an adapter with engines over all. docs/sglang.md says what only GPUs
can show.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from solver_rows import solver_row

from bench.sglang_memory import FAMILIES
from data.parquet_io import write_training_rows
from drzero.preflight.model_shape import config_of, load_shape
from drzero.recipe.compose import compose_plain, compose_stage, resolve, verl_env

ROOT = Path(__file__).parent.parent.parent
MODELS = {
    "qwen2.5-3b": "challenger",
    "qwen2.5-7b": "solver",
    "qwen3-14b": "challenger",
    "qwen3-32b": "solver",
}
SHORT = ("qwen2.5-3b",)
pytestmark = [
    pytest.mark.slow("builds models of up to 32 billion shapes; hardware=cpu runs the code with numbers"),
    pytest.mark.timeout(1200),
]


class Case:
    """A stage with a model on 8×H100."""

    def __init__(self, model, folder, tokenizer):
        self.stage = MODELS[model]
        shape = load_shape(compose_plain(self.stage, ["hardware=8xh100", f"model={model}"]).base_model)
        assert shape
        self.shape = shape
        policy = folder / model
        policy.mkdir()
        for file in tokenizer.glob("*token*"):
            (policy / file.name).symlink_to(file)
        content = config_of(shape)
        content["architectures"] = [FAMILIES[content["model_type"]]]
        (policy / "config.json").write_text(json.dumps(content))
        rows = folder / "rows.parquet"
        write_training_rows(rows, [solver_row(index, "train", "Vell") for index in range(256)])
        self.overrides = ["hardware=8xh100", f"model={model}", f"base_model={policy}"]
        self.overrides += [f"run.dir={folder / 'run'}", f"actor_rollout_ref.model.path={policy}"]
        self.overrides += ["solver.port=8001", "retrieval.port=8000"]
        self.overrides += [f"data.train_files={rows}", f"data.val_files={rows}"]
        self.config = resolve(compose_stage(self.stage, self.overrides))

    @property
    def adapter(self):
        """Weights of the LoRA adapter, or 0."""
        rank = self.config.actor_rollout_ref.model.lora_rank
        return self.shape.adapter(rank) if rank else 0

    def facts(self, python, script):
        """A script's results for this case, in the environment with SGLang."""
        here = Path(__file__).parent
        path = os.pathsep.join(map(str, (ROOT, here / "flash_attn_stand_in")))
        done = subprocess.run(
            [python, "-W", "ignore", here / script],
            **{"input": json.dumps([self.stage, self.overrides]), "text": True, "capture_output": True},
            env={**os.environ, **verl_env(self.config), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in SHORT else [pytest.mark.matrix]) for name in MODELS],
)
def case(request, tiny_model, tmp_path_factory):
    return Case(str(request.param), tmp_path_factory.mktemp("gpu_path"), tiny_model)


@pytest.fixture(scope="module")
def actor(case, sglang_python):
    return case.facts(sglang_python, "gpu_actor.py")


@pytest.fixture(scope="module")
def engines(case, sglang_python):
    return case.facts(sglang_python, "gpu_engines.py")


def test_verl_accepts_the_config_and_makes_the_trainer_of_the_stage(case, actor):
    config = case.config
    assert not actor["use_critic"] and not actor["use_reference_policy"]
    assert actor["trainer"] == config.trainer.v1.trainer_mode
    assert actor["reward"] == config.reward.custom_reward_function.name
    assert actor["prompts_a_step"] == config.data.train_batch_size
    assert actor["pools"] == {"global_pool": [8]}
    # Not the ones for a CPU.
    assert (actor["worker"], actor["engine"]) == ("ActorRolloutRefWorker", "FSDPEngineWithLMHead")


def test_each_layer_is_sharded_over_the_eight_ranks(case, actor):
    assert actor["mesh"] == ["cuda", 8]
    assert actor["parameters"] == case.shape.parameters + case.adapter
    assert actor["on_this_rank"] == actor["parameters"] / 8
    assert actor["trained"] == (case.adapter or case.shape.parameters)
    layers = {"Qwen2DecoderLayer", "Qwen3DecoderLayer"} & {
        name.removeprefix("FSDP") for name in actor["wrapped"]
    }
    assert len(layers) == 1 and actor["wraps"] >= case.shape.layers + 1


def test_it_computes_in_bfloat16_over_weights_in_float32_with_flash_attention(actor):
    assert actor["dtypes"] == ["torch.float32"]
    assert actor["computes_in"] == actor["head"][0] == "torch.bfloat16"
    assert actor["reduces_in"] == "torch.float32"
    assert actor["attention"] == "flash_attention_2" and actor["checkpointing"]
    assert actor["compiles_entropy"]


def test_optimizer_batches_and_checkpoints_are_those_of_the_config(case, actor):
    settings = case.config.actor_rollout_ref.actor
    optim = settings.optim
    assert actor["optimizer"] == ["AdamW", optim.lr, *optim.betas, optim.weight_decay]
    # 3 % of 50 steps.
    assert actor["first_rates"] == [0.0, 1.0, 1.0]
    assert actor["clip"] == settings.grad_clip
    sizes = [
        settings.ppo_micro_batch_size_per_gpu,
        case.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
    ]
    assert actor["micro_batches"] == sizes
    assert actor["mini_batch"] == case.config.data.train_batch_size
    assert actor["saves"] == ["model", "optimizer", "extra"]
    assert actor["loss"] == "drzero_bypass_mode"


def test_weights_and_optimizer_come_to_the_gpu_for_a_step_and_leave_it(case, actor):
    assert (actor["devices"], actor["loaded"], actor["offloaded"]) == (["cpu"], ["cuda:0"], ["cpu"])
    assert actor["optimizer_offloaded"] == ["cpu"]
    # Two numbers per trained weight.
    assert actor["states"] == 2 * actor["trained"] / 8


def test_the_engines_get_every_weight_once_and_whole(case, actor):
    twice = case.shape.embeddings if case.shape.tied else 0
    assert actor["sent"] == case.shape.parameters + twice
    assert actor["sent_from"] == ["cuda:0"] and not actor["sent_adapter"]
    assert actor["sent_as"] == ["torch.bfloat16" if case.adapter else "torch.float32"]
    assert actor["after"] == ["cpu"]


def test_the_weight_adapter_is_for_as_many_engines_as_the_config_has(case, actor):
    tp = case.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    assert actor["engines"] == [8 // tp, tp, 1]
    # veRL's own, not the one for host memory. Sleep releases the weights too.
    assert (actor["adapter"], actor["sleep_level"]) == ("ServerAdapter", 2)


def test_sglang_accepts_what_verl_gives_the_rollout_engine(case, engines):
    rollout, given = case.config.actor_rollout_ref.rollout, engines["rollout"]
    assert engines["gpus"] == given["tp_size"] == rollout.tensor_model_parallel_size
    assert (given["dp_size"], given["nnodes"], given["enable_lora"]) == (1, 1, None)
    assert (given["device"], given["dtype"]) == ("cuda", rollout.dtype) == ("cuda", "bfloat16")
    assert given["mem_fraction_static"] == rollout.gpu_memory_utilization
    assert given["max_running_requests"] == rollout.max_num_seqs
    assert given["sleep_on_idle"] is rollout.engine_kwargs.sglang.sleep_on_idle is True
    # Sleep, with CUDA-only parts.
    assert rollout.free_cache_engine and given["enable_memory_saver"] and given["enable_weights_cpu_backup"]
    assert not given["disable_cuda_graph"] and not given["disable_overlap_schedule"]
    assert given["attention_backend"] == "flashinfer"
    assert given["host"] == "127.0.0.1"


def test_sglang_accepts_the_command_line_of_the_solvers_server(case, engines):
    solver, given = case.config.solver, engines["solver"]
    assert (given["tp_size"], given["dp_size"]) == (solver.tp_size, solver.dp_size)
    assert given["tp_size"] * given["dp_size"] == 8
    assert (given["device"], given["dtype"]) == ("cuda", solver.dtype) == ("cuda", "bfloat16")
    assert given["mem_fraction_static"] == solver.mem_fraction_static
    assert given["context_length"] > solver.max_context_tokens
    assert (given["host"], given["port"], given["served_model_name"]) == (solver.host, 8001, "solver")
    assert given["attention_backend"] == "flashinfer" and given["sleep_on_idle"] and given["enable_metrics"]
    assert not given["enable_memory_saver"] and given["load_format"] == "auto"
