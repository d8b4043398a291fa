"""Agent-bench's mode=rollout: what a trainer that updates nothing leaves, as a table of runs."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from stage_run import RUN_LIMIT_S

from drzero.cli import main
from drzero.labs import agent_rollout
from drzero.labs.agent_rollout import Rollouts, read_rollouts, without_update
from drzero.labs.agents.report import by_cause, failed_share, print_runs
from drzero.ops.errors import RunFailed
from drzero.ops.telemetry import Progress
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.metrics import read_metrics
from environments.agent.contract import RewardRule

ONE_TURN = {"turns": [{"text": "<answer>Vell</answer>", "truncated": False, "calls": []}]}
A_SEARCH = {"turns": [{"text": "…", "truncated": False, "calls": [{"raw": "{}"}]}, *ONE_TURN["turns"]]}


def row(key, score, trajectory, why=None):
    reward = {"score": score, "valid": why is None, "reason_invalid": why}
    return {"key": key, "question": "Who came?", "trajectory": trajectory, "rollout_s": 2.0, "reward": reward}


@pytest.fixture
def left(tmp_path):
    """Two batches of two prompts × 2: six rows, one rollout that raised, one of which nothing is known."""
    for folder in ("progress", "dumps"):
        (tmp_path / folder).mkdir()
    batches = [
        [row("a_0_0", 0.0, ONE_TURN), row("a_0_1", 1.0, A_SEARCH), row("a_1_0", 0.5, ONE_TURN)],
        [
            row("b_0_0", 0.0, ONE_TURN, "the search failed: 503"),
            row("b_1_0", 3.0, ONE_TURN),
            *(row(f"c_{sample}_0", 1.0, A_SEARCH) for sample in range(2)),
        ],
    ]
    for step, rows in enumerate(batches, start=1):
        lines = [json.dumps(one) + "\n" for one in rows]
        (tmp_path / "dumps" / f"step_{step:04d}.jsonl").write_text("".join(lines))
    beats = [(10.0, "start-up"), (60.0, "rollout"), (64.0, "log-probs"), (70.0, "rollout"), (76.0, "done")]
    beaten = [json.dumps({"time": at, "step": 1, "phase": phase}) + "\n" for at, phase in beats]
    (tmp_path / "heartbeats.jsonl").write_text("".join(beaten))
    seen = [{"points": {"rollout": {"depth": depth}, "generation": {"depth": 1}}} for depth in (2, 4, 0)]
    (tmp_path / "flow.jsonl").write_text("".join(json.dumps(one) + "\n" for one in seen))
    worker_wrote(tmp_path)
    return Rollouts(tmp_path, "solver, rollout: 2 batches of 2 prompts × 2")


def worker_wrote(folder):
    progress = Progress(None)
    for _ in range(6):
        with progress.waiting("rollout"), progress.waiting("reward"):
            pass
    with pytest.raises(RuntimeError), progress.waiting("rollout"), progress.waiting("generation"):
        raise RuntimeError("the rollout engine returned no token")
    record = progress.snapshot()
    record["done"]["token"] = 120
    record["seconds"]["reward"] = 3.0
    (folder / "progress" / "1.json").write_text(json.dumps(record))


def test_each_rollout_is_a_run_and_those_without_a_row_fail_by_cause(left):
    read_rollouts(left, 8, RewardRule(0.0, 1.0))
    assert [run.returned for run in left.runs if run.failure is None] == [1.0, 0.5, 1.0, 1.0]
    causes = by_cause([run for run in left.runs if run.failure])
    assert set(causes) == {
        "the search failed: 503",
        "the reward is outside 0 to 1",
        "RuntimeError: the rollout engine returned no token",
        "left no row: see trainer.log",
    }
    assert causes["the search failed: 503"][0].data["question"] == "Who came?", "its row is its record"
    assert failed_share(left.runs).startswith("4 of 8 runs failed, of 4 kinds; most often")


def test_the_table_has_rates_calls_tokens_and_most_in_flight(left, capsys):
    read_rollouts(left, 8, RewardRule())
    print_runs(left.runs, left.seconds, left.figures, left.title)
    out = " ".join(capsys.readouterr().out.split())
    assert "finished 5 of 8 in 10.0 s, 0.8 a second" in out, "of waiting for rollouts, twice"
    assert "latency p50 2.00 s" in out and "calls a run 1.5 turns, 0.5 tool calls" in out
    assert "tokens a run 20 written" in out and "reward took 0.50 s each" in out
    assert "most at once 4 runs, 1 turns in flight" in out and "reward 0.5 to 3, mean 1.3" in out


@pytest.fixture
def config(prepared, tmp_path):
    return resolve(compose_stage("challenger", prepared.overrides(tmp_path)))


def test_a_run_without_update_has_only_batches(config):
    without_update(config, 3)
    trainer = config.trainer
    assert trainer.total_training_steps < trainer.critic_warmup, "veRL's own switch for the actor's step"
    assert (trainer.save_freq, trainer.test_freq, trainer.val_before_train) == (-1, -1, False)
    assert config.run.max_failed_share == 1.0 and trainer.logger == ["file"]


def benched(*words):
    err = io.StringIO()
    with redirect_stderr(err):
        code = main(["agent-bench", *words])
    return code, err.getvalue()


def test_a_class_of_ones_own_an_environment_and_a_stage_in_another_mode_are_refused(tmp_path):
    for words, said in (
        (["my_agent.py:MyAgent", "mode=rollout"], "write `train agent=my_agent.py:MyAgent`"),
        (["wordle", "mode=rollout"], "write `train env=wordle`"),
        (["challenger", "mode=concurrent"], "challenger is a stage: only mode=rollout runs"),
        (["solver"], "solver is a stage: only mode=rollout runs"),
        (["solver", "mode=rollout", "batches=0"], "batches"),
        (["solver", "mode=rollout", "reward_range=[1]"], "write [least,greatest]"),
    ):
        code, err = benched(*words, *([] if "batches=0" in words else [f"paths.checkpoints={tmp_path}"]))
        assert code == 2 and said in err, err


def test_the_mode_of_the_stage_is_still_its_own_and_other_words_go_to_it(tmp_path, monkeypatch):
    asked: list[Any] = []

    def run(*words):
        asked.extend(words)
        return Rollouts(tmp_path, "challenger", ended=RunFailed("services died"))

    monkeypatch.setattr(agent_rollout, "run_rollouts", run)
    words = ["mode=rollout", "mode=colocate_async", "batches=3", "hardware=cpu", "reward_range=[0,1]"]
    code, err = benched("challenger", *words)
    assert code == 1 and "the trainer ended early: services died" in err
    assert asked == ["challenger", ["mode=colocate_async", "hardware=cpu"], 3, RewardRule(0, 1)]


def test_a_trainer_that_ends_in_its_second_batch_leaves_a_table(left, config, monkeypatch):
    def ends(*_):
        raise RunFailed("trainer ended with exit code 1")

    monkeypatch.setattr(agent_rollout, "prepared", lambda composed, stage: config)
    monkeypatch.setattr(agent_rollout, "run_trial", ends)
    config.run.dir = str(left.folder)
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = 4, 2
    done = agent_rollout.run_rollouts("challenger", [], 2, RewardRule())
    assert str(done.ended) == "trainer ended with exit code 1" and len(done.runs) == 16
    ended = by_cause([run for run in done.runs if run.failure])["the trainer ended before it"]
    assert len(ended) == 9
    config.run.dir = str(left.folder / "empty")
    with pytest.raises(RunFailed, match="exit code 1"):
        agent_rollout.run_rollouts("challenger", [], 2, RewardRule())


@pytest.mark.slow("a start of the trainer; the table is made above from what one leaves")
@pytest.mark.timeout(RUN_LIMIT_S)
def test_two_batches_go_through_the_challengers_own_trainer_and_nothing_is_updated(
    prepared, speaking_model, tmp_path
):
    overrides = prepared.overrides(tmp_path, speaking_model)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["agent-bench", "challenger", "mode=rollout", *overrides, "run.name=bench"])
    assert (code, err.getvalue()) == (0, ""), out.getvalue()
    folder = tmp_path / "bench"
    names = sorted(path.name for path in (folder / "dumps").iterdir())
    assert names == ["step_0001.jsonl", "step_0002.jsonl"]
    rows = [one for path in (folder / "dumps").iterdir() for one in path.read_text().splitlines()]
    assert f"{len(rows)} of {len(rows)}" in out.getvalue() and "no fault was seen" in out.getvalue()
    metrics = read_metrics(folder)
    assert set(metrics) == {1, 2}
    assert not [name for step in metrics.values() for name in step if name.startswith("actor/")]
    assert all("drzero/hrpo/advantage_abs_mean" in step for step in metrics.values())
    assert list(folder.glob("global_step_*")) == []
    assert not (folder / "failures.jsonl").exists()
