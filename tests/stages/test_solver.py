"""The real solver stage with a tiny model: two steps of GRPO, each validated.

In the first tier it is the solver of `launched_loop`, trained on what synthesize wrote. The second adds a run
alone, on rows of our own, and the same run cut by a stop time. The policy gives one of two answers by heart
(`tiny_model.save_speaking_model`), so that answers to one question differ in reward.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Prepared
from data_order import unbroken_order
from launched_loop import LaunchedLoop
from solver_rows import write_questions
from stage_run import (
    RUN_LIMIT_S,
    Run,
    assert_nothing_left,
    checkpoint_weights,
    dumped_order,
    run_stage,
    stop_after_first_step,
)
from transformers import AutoModelForCausalLM

from drzero.cli import main
from drzero.recipe.metrics import read_metrics
from drzero.stages.result import read_result
from verl_ext.artefacts import LOG_VARIABLE
from verl_ext.checkpoints import saved_step
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory
from verl_ext.stop_time import STOP_VARIABLE

BATCH, GROUP, VALIDATION = 4, 3, 6
ANSWERS = ("Vell", "nobody")
pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)


@pytest.fixture(scope="module")
def arguments(
    prepared: Prepared, speaking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The command of a run on ten questions, with its data where synthesize would have put it."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    write_questions(checkpoints, 10, VALIDATION, ANSWERS)
    return [
        *prepared.overrides(checkpoints, speaking_model)[:-1],
        *("steps_per_iteration=2", f"data.train_batch_size={BATCH}", f"actor_rollout_ref.rollout.n={GROUP}"),
        *("trainer.save_freq=1", "trainer.test_freq=1", "actor_rollout_ref.actor.optim.lr=1e-3"),
        # A question's micro-batch is not whole: 12 rows by 4, of 3 answers each.
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    ]


@pytest.fixture(scope="module")
def alone(arguments: list[str]) -> Run:
    """A run of two steps, on the ten questions."""
    checkpoints = next(Path(a.partition("=")[2]) for a in arguments if a.startswith("paths.checkpoints"))
    run = run_stage("solver", arguments, checkpoints / "solver_iter1")
    assert run.code == 0, run.err[-3000:] + run.out[-6000:]
    return run


second_run = pytest.mark.slow("a start of its own: the solver of `launched_loop` is a real run as well")


@pytest.fixture(scope="module", params=["in the loop", pytest.param("alone", marks=second_run)])
def trained(request: pytest.FixtureRequest) -> Run:
    """A finished run of two steps."""
    if request.param == "alone":
        return cast(Run, request.getfixturevalue("alone"))
    loop: LaunchedLoop = request.getfixturevalue("launched_loop")
    assert loop.done.code == 0, loop.done.stdout[-6000:] + loop.done.stderr
    return loop.run("solver_iter1")


@pytest.fixture(scope="module")
def metrics(trained: Run) -> dict[int, dict[str, Any]]:
    return {line["step"]: line["data"] for line in trained.lines("metrics/attempt_001.jsonl")}


def rows_of(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_every_step_due_is_validated_and_reported_by_hop(
    trained: Run, metrics: dict[int, dict[str, Any]]
) -> None:
    assert sorted(metrics) == [0, 1, 2]
    rows = len(rows_of(trained.config.data.val_files))
    for step in {0, 2, *range(0, 2, trained.config.trainer.test_freq)}:
        validated = metrics[step]
        assert (validated["drzero/val/rows"], validated["drzero/val/failed"]) == (rows, 0)
        assert validated["drzero/val/em"] == pytest.approx(validated["val-core/search_zero/reward/mean@1"])
    step, hops = (
        metrics[2],
        Counter(row["extra_info"]["hop"] for row in rows_of(trained.config.data.val_files)),
    )
    assert {hop: step[f"drzero/val/rows_hop_{hop}"] for hop in hops} == hops
    right = sum(count * step[f"drzero/val/em_hop_{hop}"] for hop, count in hops.items())
    assert right / hops.total() == pytest.approx(step["drzero/val/em"])


def test_each_question_is_answered_by_a_group_scored_by_exact_match(trained: Run) -> None:
    sizes = [trained.config.actor_rollout_ref.rollout.n] * trained.config.data.train_batch_size
    for step in (1, 2):
        lines = trained.lines(f"dumps/step_{step:04d}.jsonl")
        assert sorted(Counter(line["key"].rsplit("_", 2)[0] for line in lines).values()) == sizes
    targets = {
        row["extra_info"]["doc_id"]: row["reward_model"]["ground_truth"]["target"]
        for row in rows_of(trained.config.data.train_files)
    }
    scores = set()
    for step in (1, 2):
        for line in trained.lines(f"dumps/step_{step:04d}.jsonl"):
            again = solver_reward(Trajectory.from_dict(line["trajectory"]), targets[line["doc_id"]])
            assert line["reward"]["score"] == again.score
            scores.add(again.score)
    assert scores == {0.0, 1.0}


def test_the_reported_advantages_are_those_of_the_dumped_groups(
    trained: Run, metrics: dict[int, dict[str, Any]]
) -> None:
    for step in (1, 2):
        groups: dict[str, list[float]] = {}
        for line in trained.lines(f"dumps/step_{step:04d}.jsonl"):
            groups.setdefault(line["key"].rsplit("_", 2)[0], []).append(line["reward"]["score"])
        sizes = [
            abs(score - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
            for group in groups.values()
            for score in group
        ]
        assert metrics[step]["drzero/grpo/advantage_abs_mean"] == pytest.approx(np.mean(sizes), abs=1e-4)
        differ = np.mean([len(set(group)) > 1 for group in groups.values()])
        assert metrics[step]["drzero/reward/groups_with_variance"] == pytest.approx(differ)
        assert metrics[step]["drzero/collapse/zero_variance_share"] == pytest.approx(1 - differ)


def test_the_sampler_is_the_old_policy_and_agrees_with_the_actor(
    trained: Run, metrics: dict[int, dict[str, Any]], smollm2_tokenizer: Any
) -> None:
    for step in (1, 2):
        assert abs(metrics[step]["actor/rollout_corr/kl"]) < 1e-4
        assert metrics[step]["actor/pg_clipfrac"] == 0
        # Both are means of -log p, ours over all sampled tokens, veRL's over the rows' means: a row weighs
        # as many times as much in ours as it is longer than the mean row. Lengths are those of the texts,
        # whose tokens may be others than were sampled.
        turns = [line["trajectory"]["turns"] for line in trained.lines(f"dumps/step_{step:04d}.jsonl")]
        tokens = [sum(len(smollm2_tokenizer(turn["text"])["input_ids"]) + 1 for turn in row) for row in turns]
        own, verls = (
            metrics[step]["drzero/collapse/entropy"],
            metrics[step]["actor/rollout_corr/rollout_log_ppl"],
        )
        least, most = min(tokens) / np.mean(tokens), max(tokens) / np.mean(tokens)
        assert 0 < 0.7 * least * verls <= own <= 1.4 * most * verls


def test_the_run_leaves_one_moved_checkpoint_a_result_and_a_summary(
    trained: Run, speaking_model: Path, metrics: dict[int, dict[str, Any]]
) -> None:
    before = AutoModelForCausalLM.from_pretrained(speaking_model, dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(checkpoint_weights(trained, 2)[name], before[name])
    assert [path.name for path in trained.folder.glob("global_step_*")] == ["global_step_2"]
    result = read_result(trained.folder)
    assert result and result.outputs == {"checkpoint": trained.folder / "global_step_2"}
    assert result.tokens == sum(metrics[step]["perf/total_num_tokens"] for step in (1, 2))
    assert result.figures["validation_exact_match_last"] == metrics[2]["drzero/val/em"]
    assert (
        "validation" in trained.out and "pass" not in trained.out.partition("solver_iter1: 2 steps")[2][:300]
    )
    assert json.loads((trained.folder / "summary.json").read_text())["figures"]["steps"] == 2


def test_the_data_is_drawn_in_the_order_of_an_unbroken_run(trained: Run) -> None:
    group = trained.config.actor_rollout_ref.rollout.n
    drawn = [
        Counter({key: count * group for key, count in batch.items()})
        for batch in unbroken_order(trained.config, 2)
    ]
    assert dumped_order(trained, (1, 2)) == drawn


@second_run
def test_no_solver_server_is_started(alone: Run) -> None:
    assert not any("api_server" in command for command in alone.watch.processes.values())
    assert_nothing_left(alone)


@second_run
def test_validation_is_greedy(alone: Run) -> None:
    """One question and one answer to it: half of the targets are met, or none."""
    assert {step["drzero/val/em"] for step in read_metrics(alone.folder).values()} <= {0.0, 0.5}


def announced(folder: Path) -> list[str]:
    lines = (folder.parent / "announced.jsonl").read_text().splitlines()
    return [str(Path(json.loads(line)["path"]).relative_to(folder)) for line in lines]


again = pytest.mark.slow("two more starts; the challenger's test cuts and resumes a run in the first tier")


@pytest.fixture(scope="module")
def cut(arguments: list[str], alone: Run) -> Run:
    """The same run, which saves at its end alone, with time for its start and its first step and no other."""
    folder = alone.folder.parent / "cut"
    env = {
        STOP_VARIABLE: str(stop_after_first_step(alone)),
        LOG_VARIABLE: str(folder.parent / "announced.jsonl"),
    }
    return run_stage("solver", [*arguments, "run.name=cut", "trainer.save_freq=2"], folder, env=env)


@again
def test_a_run_that_is_out_of_time_ends_with_75_and_one_line_that_says_where(cut: Run) -> None:
    assert cut.code == 75, cut.err[-3000:] + cut.out[-6000:]
    reported = [line for line in cut.err.splitlines() if line.startswith("drzero")]
    assert len(reported) == 1 and reported[0].startswith(
        "drzero solver: out of time after step 1 of 2: another step"
    )
    assert reported[0].endswith("; rerun to resume") and "Traceback" not in cut.err


@again
def test_its_step_is_saved_though_no_save_was_due_and_nothing_of_it_is_left(cut: Run) -> None:
    assert saved_step(cut.folder) == 1 and not (cut.folder / "result.json").exists()
    assert not list(cut.folder.glob("out_of_time*")) and not list(cut.folder.glob("logs/stall_*"))
    assert_nothing_left(cut)


@again
def test_what_was_whole_by_then_was_announced(cut: Run) -> None:
    assert announced(cut.folder) == ["dumps/step_0001.jsonl", "global_step_1"]


@again
def test_it_is_no_failure_to_drzero_diagnose(cut: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(cut.folder)]) == 0
    assert f"{cut.folder}: out of time\n" in capsys.readouterr().out
    (event,) = [line for line in cut.lines("logs/events.jsonl") if line["kind"] == "out_of_time"]
    assert (event["component"], event["step"]) == ("trainer", 1)


@again
def test_the_validation_of_its_step_has_not_been_waited_for(cut: Run) -> None:
    steps = read_metrics(cut.folder)
    assert ["drzero/val/em" in steps[step] for step in (0, 1)] == [True, False]


@pytest.fixture(scope="module")
def resumed(arguments: list[str], cut: Run) -> Run:
    """The same command once more, after all that reads what the first has left; now without a stop time."""
    env = {LOG_VARIABLE: str(cut.folder.parent / "announced.jsonl")}
    run = run_stage("solver", [*arguments, "run.name=cut", "trainer.save_freq=2"], cut.folder, env=env)
    assert run.code == 0, run.err[-3000:] + run.out[-6000:]
    return run


@again
def test_a_rerun_makes_the_steps_that_are_left_and_no_other(resumed: Run) -> None:
    steps = [line["step"] for line in resumed.lines("metrics/attempt_002.jsonl")]
    assert steps == [1, 2]  # the first is the validation that the cut has put off
    assert json.loads((resumed.folder / "summary.json").read_text())["figures"]["steps"] == 2


@again
def test_the_validation_that_the_cut_put_off_is_made_up_for(resumed: Run) -> None:
    steps = read_metrics(resumed.folder)
    assert [steps[step]["drzero/val/rows"] for step in (0, 1, 2)] == [VALIDATION] * 3


@again
def test_a_run_in_two_parts_draws_the_data_of_the_uncut_one(alone: Run, resumed: Run) -> None:
    assert dumped_order(resumed, (1, 2)) == dumped_order(alone, (1, 2))


def results(folder: Path) -> set[str]:
    """What a run leaves for others; its metrics and logs are one more a start."""
    places = ("dumps/*", "global_step_*/**/*", "*.json", "*.yaml", "*.txt")
    return {str(path.relative_to(folder)) for place in places for path in folder.glob(place)}


@again
def test_a_run_in_two_parts_leaves_the_files_of_the_uncut_one(alone: Run, resumed: Run) -> None:
    assert results(resumed.folder) == results(alone.folder)


@again
def test_the_second_part_announces_its_own_then_the_result_and_at_last_the_page(resumed: Run) -> None:
    ours = ["dumps/step_0002.jsonl", "global_step_2", "result.json", "report.html"]
    assert announced(resumed.folder)[2:] == ours
