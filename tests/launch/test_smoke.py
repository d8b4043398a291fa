"""The smoke test: its profile equals 8×H100's, its probes, and its verdicts.

Without a GPU, this tries pipes, shared memory, crashing and hanging processes, a shared tensor, and a
reduction by gloo.

"""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from search_parts import wait_for

from drzero.launch.arguments import parse
from drzero.launch.container import run_job
from drzero.launch.request import SMOKE_MAX_USD, Request, resolve
from drzero.launch.smoke import probe
from drzero.launch.smoke.evidence import ASLEEP, AWAKE, LARGEST_GAP, Memory, verdicts, weight_syncs
from drzero.launch.smoke.needs import Needs, Verdict, needs_of
from drzero.launch.smoke.probes import Probe, probes_for, try_out
from drzero.launch.smoke.witness import Witness
from drzero.launch.volumes import launch_folder
from drzero.preflight.run import preflight
from drzero.recipe import compose as composing
from drzero.recipe.compose import CONFIG_DIR
from drzero.recipe.metrics import Steps
from drzero.recipe.overrides import leaf_values

# The profile ------------------------------------------------------------------------------------------------

SIZES = {
    *("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "data.train_batch_size"),
    *("actor_rollout_ref.rollout.n_gpus_per_node", "trainer.n_gpus_per_node", "machine.gpus"),
    *("actor_rollout_ref.rollout.tensor_model_parallel_size", "solver.tp_size", "solver.dp_size"),
    *("actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.rollout.prompt_length"),
    *("actor_rollout_ref.rollout.response_length", "data.max_prompt_length", "data.max_response_length"),
    *("distillation.teacher_models.teacher_model.inference.prompt_length", "ray_kwargs.ray_init.num_cpus"),
    *("distillation.teacher_models.teacher_model.inference.response_length", "solver.max_context_tokens"),
    *("reward.custom_reward_function.reward_kwargs.solver.concurrency", "reward.num_workers"),
    *("reward.custom_reward_function.reward_kwargs.solver.max_context_tokens", "run.min_free_gb"),
    *("trainer.total_training_steps", "compute.count", "compute.cpu", "compute.memory", "compute.type"),
    *("compute.max_usd", "compute.timeout"),
}
"""What must differ on two small GPUs: how many, how large, for how long."""
APART = {"trainer.resume_mode", "process_env.VERL_LOGGING_LEVEL"}
"""The smoke test begins anew each time, and has veRL log memory."""


def smoke_request(*words: str) -> Request:
    return resolve(parse(["--action", "smoke", *words]))


def composed(*overrides: str) -> DictConfig:
    places = ("paths.corpus=/nonexistent", "paths.checkpoints=/nonexistent", "run.name=smoke")
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose("challenger", overrides=[*overrides, *places])


@pytest.fixture(scope="module")
def smoke():
    request = smoke_request()
    return composed(f"hardware={request.compute.hardware}", *request.command[1:])


@pytest.fixture(scope="module")
def needs(smoke):
    return needs_of(composing.resolve(smoke))


def test_its_config_is_that_of_8xh100_but_for_sizes(smoke):
    model = "base_model=Qwen/Qwen2.5-0.5B-Instruct"
    paper = composed("hardware=8xh100", "compute=8xh100", "env=demo", model)
    ours, theirs = (
        dict(leaf_values("", OmegaConf.to_container(composing.resolve(config)))) for config in (smoke, paper)
    )
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} == SIZES | APART


def test_it_needs_every_mechanism_of_8xh100_with_two_ranks_an_engine(needs):
    assert needs.has_gpus and needs.sglang and needs.sleeps and needs.offloads and needs.flash_attention
    # Two engines, the rollout's and the solver's, of two ranks each.
    assert (needs.ranks, needs.schedulers) == (2, {0: 2, 1: 2})
    assert all(each.needed for each in probes_for(needs, Path("/x/smoke"))[3:])


def test_two_small_gpus_hold_it_within_its_limit_of_dollars(smoke):
    request, report = smoke_request(), preflight(smoke, "challenger")
    assert request.usd_at_most is not None and request.usd_at_most < SMOKE_MAX_USD
    assert report.errors == []
    assert report.ledger is not None and report.ledger.capacity_gib < 24
    assert report.estimate is not None
    assert report.estimate.usd(report.estimate.expected_s) < request.usd_at_most


def test_on_one_gpu_it_needs_less():
    one = needs_of(
        composing.resolve(composed("hardware=single_gpu", *smoke_request("compute=a10g").command[1:]))
    )
    assert (one.schedulers, one.flash_attention, one.sleeps) == ({0: 2}, False, True)


# The probes -------------------------------------------------------------------------------------------------


def tried(script: str, limit_s: float = 60, needed: bool = True) -> Verdict:
    return try_out(Probe("it", (sys.executable, "-c", textwrap.dedent(script)), needed), limit_s)


@pytest.mark.parametrize(
    ("script", "proven", "why"),
    [
        ("print('noise'); print('two of them')", True, "two of them"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "killed by SIGSEGV"),
        ("import sys; print('a'); sys.exit('no such device')", False, "no such device"),
        ("{}['key']", False, "KeyError: 'key'"),
        ("import os; os._exit(3)", False, "exit code 3"),
    ],
)
def test_however_a_probe_ends_its_verdict_is_one_line(script, proven, why):
    assert tried(script) == Verdict("it", proven, why)


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    script = f"""
        import pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
        time.sleep(1000)
    """
    verdict = tried(script, limit_s=2)
    assert verdict == Verdict("it", False, "it hung: no result after 2 s")
    if (tmp_path / "pid").is_file():
        pid = int((tmp_path / "pid").read_text())
        # A killed process is gone a moment after the signal.
        wait_for(lambda: not _runs(pid), 30)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_run_can_do_without_is_reported_and_does_not_fail_it():
    verdict = tried("import sys; sys.exit('none here')", needed=False)
    assert not verdict.fails and tried("import sys; sys.exit('none here')").fails
    assert str(verdict) == "not proven  it: none here (the run does without it)"


def test_a_fifo_is_made_used_and_removed(tmp_path):
    assert probe.fifo(str(tmp_path)) == f"in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_fifo_is_named():
    with pytest.raises(probe.RunFailed, match=r"^/proc takes none: "):
        probe.fifo("/proc")


def test_shared_memory_is_compared_with_what_ray_will_ask_for():
    assert probe.shared_memory("1").endswith("Ray's object store takes 0.0")
    with pytest.raises(probe.RunFailed, match=r"takes 1000000\.0: it will be on disk"):
        probe.shared_memory(str(10**15))


def test_a_product_in_bfloat16_is_compared_with_a_whole_one():
    assert probe.bfloat16("cpu") == "products on 1 of cpu"


def test_another_process_reads_and_writes_a_tensor():
    import torch.multiprocessing

    usual = torch.multiprocessing.get_sharing_strategy()
    try:
        assert probe.ipc("cpu") == "a tensor on 1 of cpu read and written by another process"
    finally:
        torch.multiprocessing.set_sharing_strategy(usual)


@pytest.mark.slow("four imports of torch; the other probes run in process")
def test_processes_sum_a_tensor_and_one_that_cannot_ends_them_all():
    assert probe.all_reduce("cpu", "2") == "2 ranks by gloo"
    with pytest.raises(probe.RunFailed, match=r"^rank \d: "):
        probe.all_reduce("no such device", "2")


@pytest.mark.slow("five imports of torch; however a probe ends is in the first tier")
def test_on_a_machine_without_what_it_needs_nothing_is_started(tmp_path):
    command = [sys.executable, "-m", "drzero.launch.smoke.run", *smoke_request().command]
    places = [f"paths.corpus={tmp_path}", f"paths.checkpoints={tmp_path}"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    lines = re.findall(r"^\[probe\] (proven|not proven) +([^:]+): (.+)$", done.stdout, re.MULTILINE)
    assert [mechanism for _, mechanism, _ in lines] == [
        *("a FIFO for the recorder", "a FIFO on the volume", "/dev/shm", "bfloat16", "CUDA IPC"),
        *("memory that sleeps", "all-reduce", "flash-attn"),
    ]
    assert {state for state, mechanism, _ in lines if "FIFO" in mechanism} == {"proven"}
    assert {state for state, _, _ in lines[3:]} == {"not proven"}
    assert done.returncode == 1 and done.stderr.strip().startswith("smoke: not started")
    assert "Traceback" not in done.stdout + done.stderr and not (tmp_path / "smoke").exists()


@pytest.mark.slow("a run of one step; its verdicts are those below")
def test_in_its_container_a_run_ends_with_its_verdicts(prepared, speaking_model, tmp_path, monkeypatch):
    for kind in ("checkpoints", "cache"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv(f"DRZERO_MOUNT_{kind.upper()}", str(tmp_path / kind))
    monkeypatch.setenv("DRZERO_MOUNT_CORPUS", str(prepared.corpus))
    small = ("data.train_batch_size=4", "trainer.total_training_steps=1", "process_env.OMP_NUM_THREADS=1")
    words = ("compute=cpu", f"base_model={speaking_model}", "hop_ratio=[4,3,2,1]", *small)
    outcome = run_job(smoke_request(*words), {})
    assert outcome.state == "finished"
    console = (launch_folder("smoke") / "console.log").read_text()
    assert re.findall(r"\[run\] (proven|not proven) +([^:]+):", console) == [
        ("proven", "no token drift"),
        ("proven", "no failures"),
    ]
    assert "[probe]" not in console


# Proofs of a run ------------------------------------------------------------------------------------------


def logged(moment: str, memory: Memory) -> str:
    """A line of veRL's log, by the format in its source."""
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None
    verl = Path(spec.origin).parent
    assert (
        f'log_gpu_memory_usage("{moment}", logger=logger)' in (verl / "workers/engine_workers.py").read_text()
    )
    source = (verl / "utils/profiler/performance.py").read_text()
    (parts,) = re.findall(r'message = \(\s*f"(\{head\}[^"]*)"\s*f"([^"]*)"', source)
    shown = {f"mem_{name}": f"{gib:.2f}" for name, gib in dataclasses.asdict(memory).items()}
    return "(WorkerDict pid=7) DEBUG:2026-01-01:" + "".join(parts).format(head=moment, **shown)


def sync(*, slept: float = 3.0, left: float = 0.01, sent: float = 2.0) -> str:
    """The log of a weight sync, in GiB of a GPU with 22. The rank still holds the sent tensors."""
    moments = (
        (ASLEEP, Memory(left, left, 10.0 + left, 22.0)),
        ("After resume weights", Memory(left, left, 10.5 + left, 22.0)),
        ("After offload model to cpu", Memory(left + sent, left + sent, 10.5 + left + sent, 22.0)),
        (AWAKE, Memory(left + sent, left + sent, 10.0 + left + sent + slept, 22.0)),
    )
    return "\n".join(logged(moment, memory) for moment, memory in moments) + "\n"


GAP, DRIFT, FAILURES = "actor/rollout_corr/kl", "drzero/rollout/token_drift_rate", "drzero/failures/share"
GOOD = {GAP: 2e-3, DRIFT: 0.0, FAILURES: 0.0}


def steps_of(changes: dict[str, float]) -> Steps:
    return {1: GOOD, 2: GOOD, 3: GOOD | changes}


def witness(tmp_path: Path, schedulers: tuple[str, ...] = ("_TP0", "_TP1") * 2, flash: int = 2) -> Witness:
    seen = Witness(tmp_path)
    seen.schedulers = {pid: f"sglang::scheduler{rank}" for pid, rank in enumerate(schedulers)}
    seen.ranks = {100, 101}
    seen.with_flash_attention = {100, 101} if flash == 2 else {100}
    seen.pipes = {"rank_0.pipe", "rank_1.pipe"}
    return seen


def unproven(needs: Needs, seen: Witness, log: str, steps: Steps) -> dict[str, str]:
    return {each.mechanism: each.why for each in verdicts(needs, seen, log, steps) if each.fails}


def test_a_run_that_used_every_mechanism_has_proven_each(needs, tmp_path):
    judged = list(verdicts(needs, witness(tmp_path), sync() * 4, steps_of({})))
    assert [each.mechanism for each in judged if each.proven] == [
        *("tensor parallelism", "weight sync", "sleep and wake", "offload", "flash-attn in training"),
        *("the recorder's pipes", "no token drift", "no failures"),
    ]
    assert len(judged) == 8
    assert "4 times, 3.0 GiB of a GPU each or more" in str(judged[2])


@pytest.mark.parametrize(
    ("mechanism", "changes", "why"),
    [
        ("tensor parallelism", {"schedulers": ("_TP0", "_TP1", "_TP0")}, "1 of 2 of rank 1"),
        ("tensor parallelism", {"schedulers": ("", "")}, "0 of 2 of rank 1"),
        ("weight sync", {"steps": {GAP: 5.3}}, "differ by 5.3 at most"),
        ("weight sync", {"steps": {GAP: float("nan")}}, "differ by nan at most"),
        ("sleep and wake", {"log": sync() * 2}, "seen in 2 of 3 steps"),
        ("sleep and wake", {"log": sync(slept=0.2) * 4}, "seen in 0 of 3 steps"),
        ("sleep and wake", {"log": sync().partition(AWAKE)[0] * 4}, "seen in 0 of 3 steps"),
        # The weights stay, then the Adam states, which are there from the first update on.
        ("offload", {"log": sync(left=0.92) * 4}, "after an update 0.92 GiB in a rank"),
        (
            "offload",
            {"log": sync() + sync(left=1.84) * 3},
            "1.84 GiB in a rank whose part of the weights is 0.92",
        ),
        ("flash-attn in training", {"flash": 1}, "1 of 2 ranks"),
        ("no token drift", {"steps": {DRIFT: 0.125}}, "12.50% at most in 3 steps"),
        ("no failures", {"steps": {FAILURES: 0.5}}, "50.00% at most"),
    ],
)
def test_a_run_without_one_of_them_has_not_proven_it_and_says_why(needs, tmp_path, mechanism, changes, why):
    seen = witness(tmp_path, **{key: changes[key] for key in ("schedulers", "flash") if key in changes})
    found = unproven(needs, seen, changes.get("log", sync() * 4), steps_of(changes.get("steps", {})))
    assert mechanism in found and why in found[mechanism]
    # A sync that was cut off shows no offload either.
    assert found.keys() <= {mechanism, "offload"}


def test_an_engine_that_started_with_the_weights_proves_no_sync(needs, tmp_path):
    loaded = dataclasses.replace(needs, dummy_weights=False)
    found = unproven(loaded, witness(tmp_path), sync() * 4, steps_of({}))
    assert list(found) == ["weight sync"] and "had started with these weights" in found["weight sync"]


def test_a_run_without_steps_proves_nothing_but_its_processes(needs, tmp_path):
    assert unproven(needs, witness(tmp_path), "", {}).keys() == {
        *("weight sync", "sleep and wake", "offload", "no token drift", "no failures")
    }


@given(gap=st.floats(0, 10), steps=st.integers(1, 5))
def test_the_gap_between_engine_and_actor_is_the_largest_of_all_steps(gap, steps):
    needs = Needs(False, 1, True, {}, False, 0.25, False, None, False, True, 0)
    measured = {step: GOOD | {GAP: -gap / step} for step in range(1, steps + 1)}
    (sync_, *_) = verdicts(needs, Witness(Path("/nonexistent")), "", measured)
    assert sync_.proven == (gap <= LARGEST_GAP)


def test_memory_is_read_from_the_lines_of_whole_syncs_only():
    cut = sync().splitlines()[:3]
    found = weight_syncs("\n".join(["noise", *sync(slept=2.5).splitlines(), "more", *cut]))
    assert found == [(Memory(0.01, 0.01, 10.01, 22.0), Memory(2.01, 2.01, 14.51, 22.0))]


PLAYER = """
import mmap, pathlib, sys, time
import setproctitle
setproctitle.setproctitle(sys.argv[1])
for path in sys.argv[2:]:
    with open(path, "rb") as library:
        held = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def players(tmp_path):
    library = tmp_path / "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so"
    library.write_bytes(b"library")
    words = {
        "scheduler": ["sglang::scheduler_TP1"],
        "rank with": ["ray::WorkerDict.actor_rollout_update_actor", str(library)],
        "rank without": ["ray::WorkerDict"],
        "other": ["ray::AgentLoopWorker", str(library)],
    }
    began = {
        name: subprocess.Popen([sys.executable, "-c", PLAYER, *rest], stdout=subprocess.PIPE)
        for name, rest in words.items()
    }
    for process in began.values():
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
    yield {name: process.pid for name, process in began.items()}
    for process in began.values():
        process.kill()
        process.communicate()


def test_a_witness_sees_schedulers_ranks_their_libraries_and_pipes(players, tmp_path):
    os.mkfifo(tmp_path / "rank_0.pipe")
    with Witness(tmp_path) as seen:
        seen.look()
    assert seen.schedulers == {players["scheduler"]: "sglang::scheduler_TP1"}
    assert seen.ranks == {players["rank with"], players["rank without"]}
    assert seen.with_flash_attention == {players["rank with"]}
    assert seen.pipes == {"rank_0.pipe"}
