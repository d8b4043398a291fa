"""The GPUs at hand, as the memory ledger takes them."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from search_parts import wait_for

from drzero.ops.resources.gpu import GpuSample
from drzero.ops.resources.others import largest_others
from drzero.preflight import machine, memory
from drzero.preflight.machine import declared_machine
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_plain, compose_stage, resolve
from drzero.stages.demo import demo_overrides


@pytest.mark.parametrize(
    ("driver", "total_mb", "memory_gib", "tflops"),
    [
        ("NVIDIA H200", 143_771, 139.8, 989),
        ("NVIDIA H100 80GB HBM3", 81_559, 79.2, 989),
        ("NVIDIA A100-SXM4-80GB", 81_920, 79.2, 312),
        ("NVIDIA A100-PCIE-40GB", 40_960, 39.4, 312),
        ("NVIDIA A10G", 23_028, 22.1, 70),
        ("NVIDIA L4", 23_034, 22.0, 121),
        ("NVIDIA L40S", 46_068, 44.4, 362),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, 94.9, 504),
        ("Tesla T4", 15_360, 14.6, 65),
        ("a card of next year", 204_800, 200.0, 989),
        ("", 24_576, 24.0, 989),
    ],
)
def test_a_local_machine_has_the_memory_of_its_own_gpus(monkeypatch, driver, total_mb, memory_gib, tflops):
    config = resolve(compose_plain("solver", ["hardware=single_gpu", "model=demo-policy"]))
    sample = GpuSample(0, 0, total_mb, 0, name=driver)
    monkeypatch.setattr(machine, "Gpus", lambda: SimpleNamespace(read=lambda: [sample]))
    gpu = declared_machine(config, starting=True).gpu
    assert gpu is not None and gpu.memory_gib == pytest.approx(memory_gib, rel=0.001)
    assert gpu.bf16_tflops == tflops


@pytest.mark.parametrize(
    ("driver", "capability", "has_bf16"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), False),
        ("Tesla T4", (7, 5), False),
        ("Quadro RTX 6000", (7, 5), False),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), False),
        ("NVIDIA A10G", (8, 6), True),
        ("NVIDIA GeForce RTX 3090", (8, 6), True),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), True),
        ("Tesla T4", None, False),
        ("a card of next year", None, True),
    ],
)
def test_a_gpu_without_bfloat16_is_known_by_what_it_can_and_training_on_it_says_so(
    monkeypatch, driver, capability, has_bf16
):
    sample = GpuSample(0, 0, 16_384, 0, name=driver, capability=capability)
    monkeypatch.setattr(machine, "Gpus", lambda: SimpleNamespace(read=lambda: [sample]))
    config = compose_stage("train", ["env=wordle", "hardware=single_gpu", "model=demo-policy"])
    found = [one for one in preflight(config, "train", starting=True).findings if "bfloat16" in one.why]
    keys = [] if has_bf16 else ["actor_rollout_ref.rollout.dtype", "machine.gpu"]
    assert [one.key for one in found] == keys and all(driver[7:] in one.why for one in found)


def test_a_machine_that_is_rented_elsewhere_has_what_it_declares(monkeypatch):
    config = resolve(compose_plain("solver", ["compute=single_h100", "hardware=single_gpu"]))
    sample = GpuSample(0, 0, 143_771, 0, name="NVIDIA H200")
    monkeypatch.setattr(machine, "Gpus", lambda: SimpleNamespace(read=lambda: [sample]))
    gpu = declared_machine(config, starting=False).gpu
    assert gpu is not None and gpu.name == "H100"


@pytest.mark.parametrize(
    ("free_gib", "severity", "said"),
    [
        (8, "error", "of which 8.0 are free, and Ray kills workers once less than 1.2 are"),
        (11, "error", "at full length the run takes 14.8 GiB of 24.0"),
        (13.7, "error", "chrome 9.0 GiB (pid 8)) until 16.0 GiB are free"),
        (13.9, "warning", "of which 13.9 are free"),
        (15.9, "warning", "until 16.0 GiB are free"),
        (16, None, ""),
        (24, None, ""),
    ],
)
def test_the_memory_that_others_leave_is_what_a_start_has(monkeypatch, free_gib, severity, said):
    config = compose_stage("challenger", demo_overrides([]))
    monkeypatch.setattr(machine, "memory_limit", lambda: 24 * 2**30)
    monkeypatch.setattr(machine, "memory_free", lambda: int(free_gib * 2**30))
    monkeypatch.setattr(memory, "largest_others", lambda: "chrome 9.0 GiB (pid 8)")
    found = [f for f in preflight(config, "challenger", starting=True).findings if f.key == "memory"]
    assert [str(one.severity) for one in found] == ([severity] if severity else [])
    text = "".join(map(str, found))
    assert said in text and ("close other programs (chrome 9.0 GiB (pid 8))" in text) == bool(severity)
    assert ("or set" in text) == (severity is not None and free_gib > 11)  # else nothing lower is enough


@pytest.mark.parametrize(
    ("whole_gib", "free_gib", "batch", "said"),
    [
        (24, 15, 1, "16.0 GiB are free, or set {seqs}=8 solver.max_batch_size=20"),
        (24, 14.4, 1, "16.0 GiB are free, or set {seqs}=4 solver.max_batch_size=10"),
        (24, 17, 2, "GiB are free, or set {batch}=1"),
        (15.5, 15, 1, "close other programs, or set solver.max_batch_size=20"),
        (24, 13, 1, "GiB are free, or set {again}=true {seqs}=8 solver.max_batch_size=20"),
        (24, 12, 1, "GiB are free, or set {again}=true {seqs}=2 solver.max_batch_size=2"),
    ],
)
def test_fewer_sequences_are_advised_if_they_fit(monkeypatch, whole_gib, free_gib, batch, said):
    monkeypatch.setattr(machine, "memory_limit", lambda: int(whole_gib * 2**30))
    monkeypatch.setattr(machine, "memory_free", lambda: int(free_gib * 2**30))
    monkeypatch.setattr(memory, "largest_others", lambda: "")
    actor = "actor_rollout_ref"
    keys = {"seqs": f"{actor}.rollout.max_num_seqs", "batch": f"{actor}.actor.ppo_micro_batch_size_per_gpu"}
    keys["again"] = f"{actor}.model.enable_gradient_checkpointing"

    def short_of(overrides):
        found = preflight(compose_stage("challenger", demo_overrides(overrides)), "challenger", starting=True)
        return "".join(str(one) for one in found.findings if one.key == "memory")

    text = short_of(size := [f"{keys['batch']}={batch}"])
    assert said.format(**keys) in text
    assert short_of([*size, *text.partition("or set ")[2].split()]) == ""


def test_the_largest_other_programs_are_named_without_the_runs_own():
    hold = "import sys; held = bytearray(400 << 20); held[::4096] = b'1' * len(held[::4096]); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE) as own:
        try:
            # A child of this process is its own; seen from a process beside it, it is another program.
            look = "from drzero.ops.resources.others import largest_others as f; print(f(), '|', f([%d]))"
            wait_for(lambda: psutil.Process(own.pid).memory_info().rss > 400 << 20, 20)
            assert f"(pid {own.pid})" not in largest_others()
            beside = subprocess.run([sys.executable, "-c", look % own.pid], capture_output=True, text=True)
        finally:
            own.kill()
    seen, without = beside.stdout.split("|")
    assert f"(pid {own.pid})" not in without and (f"(pid {own.pid})" in seen or seen.count("GiB") == 3)
