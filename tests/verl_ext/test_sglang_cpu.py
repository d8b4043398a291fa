"""Configs, commands and refusals of SGLang on a CPU, without SGLang. tests/rehearsal/ runs it."""

import sys
from pathlib import Path

import pytest

from drzero.launch.image.pins import GPU_PINS
from drzero.ops.versions import normalised, pinned_versions
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import solver_spec
from verl_ext.sglang.compat import PINNED
from verl_ext.sglang.cpu import STAND_INS, environment, refusal_on_cpu

ROOT = Path(__file__).resolve().parents[2]


def composed(stage, *overrides):
    return resolve(compose_stage(stage, ["solver.port=8001", *overrides]))


@pytest.fixture(scope="module")
def challenger():
    return composed("challenger", "hardware=cpu", "rollout=sglang", "machine.gpus=2")


ENGINES = [(["hardware=cpu"], "reference"), (["hardware=single_gpu"], "reference")]
ENGINES += [(["hardware=8xh100"], "sglang"), (["hardware=cpu", "rollout=sglang"], "sglang")]
ENGINES += [(["hardware=8xh100", "rollout=reference"], "reference")]


@pytest.mark.parametrize(("overrides", "engine"), ENGINES)
def test_the_hardware_picks_the_engine_unless_it_is_chosen(overrides, engine):
    assert composed("evaluate", *overrides).solver.engine == engine


def test_one_group_picks_the_engine_of_rollouts_and_solver(challenger):
    rollout = challenger.actor_rollout_ref.rollout
    assert rollout.name == challenger.solver.engine == "sglang" and rollout.free_cache_engine
    # Two ranks are two devices for Ray.
    assert challenger.ray_kwargs.ray_init.num_gpus == challenger.trainer.n_gpus_per_node == 2


def test_the_solvers_server_gets_the_rollout_engines_arguments(challenger):
    given = challenger.actor_rollout_ref.rollout.engine_kwargs.sglang
    spec = solver_spec(challenger)
    command = list(spec.command)
    for name in ("device", "attention_backend", "sampling_backend", "grammar_backend"):
        assert command[command.index(f"--{name.replace('_', '-')}") + 1] == given[name]
    assert {"--disable-overlap-schedule", "--sleep-on-idle"} <= set(command)
    assert given.disable_overlap_schedule and given.sleep_on_idle
    assert "flashinfer" not in command
    assert spec.env["SGLANG_USE_CPU_ENGINE"] == "1"
    # One thread next to each rollout engine.
    assert spec.env["OMP_NUM_THREADS"] == str(challenger.solver.threads)


def test_on_a_gpu_none_of_it_is_set():
    spec = solver_spec(composed("evaluate", "hardware=8xh100"))
    assert "torch_native" not in spec.command and not any(name.startswith("SGLANG") for name in spec.env)


@pytest.mark.parametrize("tp", [1, 2, 5])
def test_each_rank_of_an_engine_has_a_core(tp):
    assert environment(tp)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == tp - 1


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    return tmp_path


def install(folder, name, version):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_another_sglang_version_is_refused(packages):
    install(packages, "sglang", "0.5.11")
    reason = refusal_on_cpu() or ""
    assert PINNED in reason and "0.5.11 is installed" in reason


@pytest.mark.parametrize("kernels", [False, True], ids=["no kernels", "CUDA kernels"])
def test_an_environment_for_cuda_is_refused(packages, kernels):
    install(packages, "sglang", PINNED)
    if kernels:
        install(packages, "sgl_kernel", "0.4.3")
    assert "no stand-in for SGLang's kernels" in (refusal_on_cpu() or "")


def test_an_incomplete_sglang_and_another_processor_are_refused(packages, monkeypatch):
    install(packages, "sglang", PINNED)
    (packages / "sglang" / "srt").mkdir()
    (packages / "sglang" / "srt" / "server_args.py").write_text("")
    monkeypatch.syspath_prepend(str(STAND_INS))
    assert "it lacks" in (refusal_on_cpu() or "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "on aarch64" in (refusal_on_cpu() or "")


def test_preflight_refuses_it_in_one_line(packages):
    install(packages, "sglang", "0.5.11")
    config = compose_stage("evaluate", ["hardware=cpu", "rollout=sglang"])
    found = [each for each in preflight(config, "evaluate", starting=True).errors if "SGLang" in each.why]
    assert len(found) == 1 and "rollout=reference" in str(found[0])


def test_the_rehearsals_requirements_repeat_a_pin_only_for_verifiers():
    lines = (ROOT / "requirements-sglang-cpu.txt").read_text().splitlines()
    listed = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert listed["sglang"] == PINNED == GPU_PINS["sglang"]
    both = {normalised(name) for name in listed} & pinned_versions().keys()
    assert both == {"openai", "openai-harmony"}
