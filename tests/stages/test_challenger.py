"""The real challenger stage with a tiny model: a step, the stop time, a second step, a failure in the third.

What a finished run leaves is asserted on the challenger of `launched_loop`. The second tier starts runs by
`python -m drzero.cli challenger …` in a process of its own: real services, veRL's own trainer, checkpoint;
cuts one, resumes it, finishes it after a failure, and trains the next iteration's on it. The policy knows
the protocol by heart (`tiny_model.save_speaking_model`), so that there are searches, solver attempts and
rewards that differ.
"""

import ipaddress
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from chaos import STEPS, beat
from data_order import unbroken_order
from omegaconf import OmegaConf
from search_parts import wait_for
from stage_run import (
    RUN_LIMIT_S,
    assert_nothing_left,
    checkpoint_weights,
    dumped_order,
    run_stage,
    stop_after_first_step,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.stages.examples import read_examples
from drzero.stages.result import read_result
from verl_ext.checkpoints import saved_step
from verl_ext.method.challenger_reward import challenger_reward
from verl_ext.method.trajectory import Trajectory

BATCH = 8
PHASES = ["rollout", "log-probs", "advantage", "update", "save", "weight-sync"]
pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def arguments(prepared, speaking_model, checkpoints):
    """The command of the run, as a user would type it."""
    return [
        *prepared.overrides(checkpoints, speaking_model),
        *("trainer.total_training_steps=3", f"data.train_batch_size={BATCH}"),
        # A tiny model needs a larger rate to move visibly.
        *("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.max_actor_ckpt_to_keep=3", "+trainer.foo=1"),
    ]


@pytest.fixture(scope="module")
def finished(launched_loop):
    """The loop's challenger, of two steps."""
    assert launched_loop.done.code == 0, launched_loop.done.stdout[-6000:] + launched_loop.done.stderr
    return launched_loop.run("challenger_iter1")


@pytest.fixture(scope="module")
def metrics(finished):
    return finished.lines("metrics/attempt_001.jsonl")


@pytest.fixture(scope="module")
def rollouts(finished):
    return finished.lines("dumps/step_0001.jsonl") + finished.lines("dumps/step_0002.jsonl")


def test_both_steps_have_metrics_without_failures_and_log_probs_that_agree(metrics):
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        for phase in ("gen", "adv", "update_actor", "save_checkpoint", "update_weights", "step"):
            assert line["data"][f"timing_s/{phase}"] >= 0
    failures = ["failures/share", "failures/rollouts_lost", "failures/rows_invalid", "failures/searches"]
    for name in [*failures, "rollout/token_drift_rate", "solver/attempts_failed"]:
        assert [line["data"][f"drzero/{name}"] for line in metrics] == [0.0, 0.0], name
    for line in metrics:
        assert abs(line["data"]["actor/rollout_corr/kl"]) < 1e-4


def test_rollouts_are_real_and_dumped_rewards_are_those_of_their_trajectories(rollouts):
    calls = [call for r in rollouts for turn in r["trajectory"]["turns"] for call in turn["calls"]]
    assert any(call["queries"] and call["response"] for call in calls)
    assert any(r["reward"]["integrity"] and len(r["attempts"]) == 5 for r in rollouts)
    assert len({r["reward"]["score"] for r in rollouts}) > 1
    for rollout in rollouts:
        reward = rollout["reward"]
        k = sum(attempt["right"] for attempt in rollout["attempts"]) if rollout["attempts"] else None
        again = challenger_reward(
            Trajectory.from_dict(rollout["trajectory"]), rollout["document"], rollout["hop"], n=5, k=k
        )
        assert {name: reward[name] for name in asdict(again)} == asdict(again)


def test_there_is_one_dump_line_a_rollout_and_advantages_are_those_of_the_dumped_rewards(finished, metrics):
    for step, line in enumerate(metrics, start=1):
        dumped = finished.lines(f"dumps/step_{step:04d}.jsonl")
        assert len({one["key"] for one in dumped}) == len(dumped) == finished.config.data.train_batch_size
        assert {one["step"] for one in dumped} == {step}
        assert all(one["trajectory"]["turns"] for one in dumped)
        by_hop: dict[int, list[float]] = {}
        for rollout in dumped:
            by_hop.setdefault(rollout["hop"], []).append(rollout["reward"]["score"])
        sizes = [
            abs(score - np.mean(group)) / np.sqrt(np.var(group) + 1e-6)
            for group in by_hop.values()
            for score in group
        ]
        assert line["data"]["drzero/hrpo/advantage_abs_mean"] == pytest.approx(np.mean(sizes), abs=1e-4)


def test_heartbeats_are_the_phases_in_order(finished):
    beats = [(beat["step"], beat["phase"]) for beat in finished.lines("heartbeats.jsonl")]
    phases = [(step, phase) for step in range(1, STEPS + 1) for phase in PHASES]
    assert beats == [(0, "start-up"), *phases, (STEPS, "done")]


# What a finished run leaves.


def tokens_of(run):
    """The tokens of a run's rollouts, and of its solver's attempts."""
    steps = [line["data"] for line in run.lines("metrics/attempt_001.jsonl")]
    names = ("perf/total_num_tokens", "drzero/solver/attempt_tokens", "drzero/solver/attempt_tokens_in")
    of_rollouts, *of_attempts = (sum(step[name] for step in steps) for name in names)
    assert of_rollouts > 0
    return of_rollouts + sum(of_attempts)


def test_the_run_ends_with_summary_questions_and_a_result_that_counts_tokens(finished):
    for name in ("checkpoint", "export", "dumps, metrics, logs"):
        assert name in finished.out
    assert json.loads((finished.folder / "summary.json").read_text())["figures"]["steps"] == STEPS
    examples = read_examples(finished.folder)
    assert examples and 0 < len(examples.accepted) + len(examples.rejected) <= 6
    for one in (*examples.accepted, *examples.rejected):
        assert f"{one.question or '–'} → {one.answer or '–'}" in finished.out and one.reason in finished.out
    outputs = {"checkpoint": finished.folder / f"global_step_{STEPS}", "export": finished.export}
    result = read_result(finished.folder)
    assert result.outputs == outputs
    assert result.tokens == tokens_of(finished)


def test_a_good_run_logs_no_traceback_and_prints_few_lines_in_a_pipe(finished, launched_loop):
    assert "Traceback" not in (finished.folder / "logs" / "trainer.log").read_text()
    assert "engine is not available" not in (finished.folder / "logs" / "merger.log").read_text()
    log = launched_loop.mounted / "evolve" / "logs" / "challenger_iter1.log"
    lines = log.read_text().splitlines()
    assert len(lines) <= 60 and [line for line in lines if line != line.rstrip()] == []


def test_the_export_is_the_last_checkpoint_with_its_template_and_log_probs(finished, speaking_model):
    source = json.loads((finished.export / "export.json").read_text())["source"]
    assert source["step"] == f"global_step_{STEPS}"
    exported, original = (AutoTokenizer.from_pretrained(p) for p in (finished.export, speaking_model))
    assert exported.chat_template == original.chat_template
    assert exported.eos_token == original.eos_token == "<|im_end|>"
    exported = AutoModelForCausalLM.from_pretrained(finished.export, dtype=torch.float32)
    from_checkpoint = AutoModelForCausalLM.from_pretrained(speaking_model, dtype=torch.float32)
    from_checkpoint.load_state_dict(checkpoint_weights(finished, STEPS))
    tokenizer = AutoTokenizer.from_pretrained(finished.export)
    ids = tokenizer("<question>Who came?</question>", return_tensors="pt").input_ids
    with torch.no_grad():
        ours, theirs = (model(ids).logits.float().log_softmax(-1) for model in (exported, from_checkpoint))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_tensorboard_has_the_metrics(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("drzero/reward/score")] == [1, 2]


# Started by a command of its own: cut by its stop time, resumed and failed, finished, and taken over.


@pytest.fixture(scope="module")
def cut(arguments, checkpoints, finished):
    """The first step, which the stop time ends; no save would be due before the third."""
    env = {
        STOP_VARIABLE: str(stop_after_first_step(finished)),
        LOG_VARIABLE: str(checkpoints / "announced.jsonl"),
    }
    return run_stage("challenger", [*arguments, "trainer.save_freq=3"], checkpoints / "tiny", env=env)


@pytest.fixture(scope="module")
def killed(arguments, cut):
    """Without a stop time, after all that reads what the first has left: the second step, and a third.

    In the third's rollout the solver is killed (SIGKILL), which is not started again.
    """
    folder, since = cut.folder, time.time()

    def kill(watch):
        wait_for(lambda: beat(3, "rollout")(folder, since), RUN_LIMIT_S)
        port = OmegaConf.load(folder / "resolved.yaml").solver.port
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                os.kill(connection.pid, signal.SIGKILL)

    return run_stage("challenger", [*arguments, "trainer.save_freq=1"], folder, kill)


def second_tier(test):
    """A mark for what reads a run of its own."""
    reason = "starts of the trainer; test_training.py, test_resume.py and test_ops_faults.py in the first"
    return pytest.mark.matrix(pytest.mark.slow(reason)(test))


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@second_tier
def test_a_run_that_is_out_of_time_ends_with_75_and_one_line_and_its_step_is_saved_and_announced(cut):
    assert cut.code == 75, cut.err[-3000:] + cut.out[-6000:]
    (reported,) = [line for line in cut.err.splitlines() if line.startswith("drzero")]
    assert reported.startswith("drzero challenger: out of time after step 1 of 3: another step")
    assert reported.endswith("; rerun to resume") and "Traceback" not in cut.err
    assert saved_step(cut.folder) == 1 and not (cut.folder / "result.json").exists()
    assert not list(cut.folder.glob("out_of_time*")) and not list(cut.folder.glob("logs/stall_*"))
    assert not cut.export.exists()
    assert_nothing_left(cut)
    announced = (cut.folder.parent / "announced.jsonl").read_text().splitlines()
    paths = [Path(json.loads(line)["path"]).relative_to(cut.folder) for line in announced]
    assert list(map(str, paths)) == ["dumps/step_0001.jsonl", "global_step_1"]


@second_tier
def test_a_rerun_resumes_after_the_last_step_with_the_data_of_an_unbroken_one(killed):
    assert [line["step"] for line in killed.lines("metrics/attempt_002.jsonl")] == [2]
    assert dumped_order(killed, (1, 2)) == unbroken_order(killed.config, 2)
    assert killed.config.trainer.foo == 1  # a key of the user's own
    beats = [(beat["step"], beat["phase"]) for beat in killed.lines("heartbeats.jsonl")]
    assert beats[0] == (0, "start-up")
    resumed_at = max(place for place, (_, phase) in enumerate(beats) if phase == "start-up")
    assert [beat for beat in beats[:resumed_at] if beat[1] in PHASES] == [(1, phase) for phase in PHASES]
    expected = [*((2, phase) for phase in PHASES), (3, "rollout")]
    assert beats[resumed_at + 1 :][: len(expected)] == expected


@second_tier
def test_training_moved_the_weights_and_a_resumed_run_starts_from_the_saved_ones(killed, speaking_model):
    before = AutoModelForCausalLM.from_pretrained(speaking_model, dtype=torch.float32).state_dict()[WEIGHT]
    first, second = (checkpoint_weights(killed, step)[WEIGHT] for step in (1, 2))
    assert not torch.equal(before, first)
    assert 0 < (second - first).abs().max() < 5e-3  # one step of Adam at 1e-3, not a start from elsewhere


@second_tier
def test_nothing_listened_beyond_loopback(killed):
    assert (killed.config.retrieval.host, killed.config.retrieval.port) in killed.watch.listeners
    hosts = {ip.removeprefix("::ffff:") for ip, _ in killed.watch.listeners}
    assert [host for host in hosts if not ipaddress.ip_address(host).is_loopback] == []


@second_tier
def test_a_killed_service_ends_the_run_with_its_name_and_log_and_leaves_nothing_behind(killed):
    assert killed.code == 1, killed.err[-3000:]
    assert "service 'solver' died: killed by SIGKILL" in killed.err
    assert str(killed.folder / "logs" / "solver.log") in killed.err
    assert "Traceback" not in killed.err.split("last lines:")[0]
    assert_nothing_left(killed)
    assert not list(killed.folder.glob("**/*.partial")) and not killed.export.exists()
    left = sorted(path.name for name in ("dumps/*", "global_step_*") for path in killed.folder.glob(name))
    assert left == ["global_step_1", "global_step_2", "step_0001.jsonl", "step_0002.jsonl"]


@pytest.fixture(scope="module")
def resumed(arguments, killed):
    """The same command again, after all that reads the killed run's files has had its turn."""
    run = run_stage("challenger", [*arguments, "trainer.save_freq=1"], killed.folder)
    assert run.code == 0, run.err[-3000:] + run.out[-6000:]
    return run


@pytest.fixture(scope="module")
def continued(arguments, resumed):
    """The next iteration's challenger: a folder of its own, one step on from where the last one ended."""
    words = ["run.name=next", f"continue_from={resumed.folder}", "trainer.total_training_steps=4"]
    words = [*arguments, *words, "trainer.save_freq=1"]
    run = run_stage("challenger", words, resumed.folder.parent / "next")
    assert run.code == 0, run.err[-3000:] + run.out[-6000:]
    return run


@second_tier
def test_the_next_iteration_keeps_counting_and_draws_the_data_of_one_unbroken_run(continued):
    assert [line["step"] for line in continued.lines("metrics/attempt_001.jsonl")] == [4]
    assert [path.name for path in continued.folder.glob("global_step_*")] == ["global_step_4"]
    assert dumped_order(continued, (4,)) == unbroken_order(continued.config, 4)[3:]


@second_tier
def test_it_takes_over_weights_and_optimizer(resumed, continued):
    third, fourth = checkpoint_weights(resumed, 3)[WEIGHT], checkpoint_weights(continued, 4)[WEIGHT]
    assert 0 < (fourth - third).abs().max() < 5e-3  # one step of Adam at 1e-3
    shard = continued.folder / "global_step_4" / "actor" / "optim_world_size_1_rank_0.pt"
    optimizer = torch.load(shard, weights_only=False)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {4}


@second_tier
def test_its_result_is_of_its_own_step(continued):
    outputs = {"checkpoint": continued.folder / "global_step_4", "export": continued.export}
    result = read_result(continued.folder)
    assert result.outputs == outputs
    assert result.tokens == tokens_of(continued)
