"""What a training adds on a Ray cluster: its workers' environment, and the processes of all nodes."""

import pytest
from omegaconf import OmegaConf

from drzero.ops.watchdog.diagnosis import Landmarks, Situation, diagnose
from drzero.ops.watchdog.movement import Stall
from drzero.ops.watchdog.report import grouped, stall_report
from drzero.ops.watchdog.stacks import Frame, Stack, Thread
from drzero.recipe.compose import compose_stage, resolve, write_resolved
from drzero.stages.nodes import read_elsewhere, share_environment
from drzero.stages.training import trainer_env

STALL = Stall("phase", "update", "", 600, 300)


@pytest.fixture
def config(tmp_path):
    nodes = ["machine.nodes=2", "machine.ray_address=127.0.0.1:6379"]
    return resolve(compose_stage("solver", ["hardware=cpu", *nodes, f"run.dir={tmp_path}"]))


def test_workers_of_a_cluster_get_the_trainers_environment_without_secrets_through_ray(
    config, tmp_path, monkeypatch
):
    monkeypatch.setenv("DRZERO_STOP_AT", "12345")
    for name in ("RETRIEVAL_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "a-secret-token")
    share_environment(config, trainer_env(config, tmp_path))
    written = write_resolved(config)
    assert "a-secret-token" not in written.read_text()
    given = OmegaConf.load(written).ray_kwargs.ray_init.runtime_env.env_vars
    assert (given.VERL_USE_EXTERNAL_MODULES, given.VERL_PLATFORM) == ("verl_ext.plugin", "cpu")
    assert str(tmp_path / "progress") == given.DRZERO_PROGRESS_DIR
    assert given.DRZERO_STOP_AT == "12345"


def rank(number, node):
    frames = (Frame("wait", "torch/distributed/work.py", 3),)
    return Stack(
        number, "trainer", f"ray::WorkerDict_{number}", "S", (Thread("MainThread", frames),), node=node
    )


def test_a_page_names_nodes_processes_and_a_cluster_that_does_not_answer():
    unseen = ["node 10.0.0.2 (gpu-2): no answer within 40 s"]
    situation = Situation(
        phase="update", step=3, stall=STALL, stacks=[rank(7, "10.0.0.1 (gpu-1)")], unseen=unseen
    )
    page = stall_report(situation, diagnose(situation, Landmarks()), Landmarks(), {}, {}, 1.0)
    assert "pid 7 on 10.0.0.1 (gpu-1)" in page
    assert "- node 10.0.0.2 (gpu-2): no answer within 40 s" in page
    assert "sampled only on the run's own node" in page
    (line,) = grouped([rank(7, "10.0.0.1"), rank(7, "10.0.0.2")], Landmarks())
    assert line.startswith("2 × ") and "7 on 10.0.0.1" in line and "7 on 10.0.0.2" in line
    there = read_elsewhere("127.0.0.1:1", {}, 1.0, native=False)
    assert there.stacks == () and "did not answer" in there.unseen[0]
    assert read_elsewhere(None, {}, 1.0, native=False).unseen == ()
