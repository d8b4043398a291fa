"""The real solver stage with a tiny model: two steps of GRPO, each validated.

It is the solver of `launched_loop`, trained on what synthesize wrote. The policy gives one of two answers by
heart (`tiny_model.save_speaking_model`), so that answers to one question differ in reward.
"""

import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from data_order import unbroken_order
from stage_run import RUN_LIMIT_S, checkpoint_weights, dumped_order
from transformers import AutoModelForCausalLM

from drzero.stages.result import read_result
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory

CORR = "actor/rollout_corr"
pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)


@pytest.fixture(scope="module")
def trained(launched_loop):
    """A finished run of two steps."""
    assert launched_loop.done.code == 0, launched_loop.done.stdout[-6000:] + launched_loop.done.stderr
    return launched_loop.run("solver_iter1")


@pytest.fixture(scope="module")
def metrics(trained):
    return {line["step"]: line["data"] for line in trained.lines("metrics/attempt_001.jsonl")}


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_every_step_due_is_validated_and_reported_by_hop(trained, metrics):
    assert sorted(metrics) == [0, 1, 2]
    rows = len(rows_of(trained.config.data.val_files))
    for step in {0, 2, *range(0, 2, trained.config.trainer.test_freq)}:
        validated = metrics[step]
        assert (validated["drzero/val/rows"], validated["drzero/val/failed"]) == (rows, 0)
        assert validated["drzero/val/em"] == pytest.approx(validated["val-core/search_zero/reward/mean@1"])
    step = metrics[2]
    hops = Counter(row["extra_info"]["hop"] for row in rows_of(trained.config.data.val_files))
    assert {hop: step[f"drzero/val/rows_hop_{hop}"] for hop in hops} == hops
    right = sum(count * step[f"drzero/val/em_hop_{hop}"] for hop, count in hops.items())
    assert right / hops.total() == pytest.approx(step["drzero/val/em"])


def test_each_question_is_answered_by_a_group_scored_by_exact_match(trained):
    sizes = [trained.config.actor_rollout_ref.rollout.n] * trained.config.data.train_batch_size
    targets = {
        row["extra_info"]["doc_id"]: row["reward_model"]["ground_truth"]["target"]
        for row in rows_of(trained.config.data.train_files)
    }
    scores = set()
    for step in (1, 2):
        lines = trained.lines(f"dumps/step_{step:04d}.jsonl")
        assert sorted(Counter(line["key"].rsplit("_", 2)[0] for line in lines).values()) == sizes
        for line in lines:
            again = solver_reward(Trajectory.from_dict(line["trajectory"]), targets[line["doc_id"]])
            assert line["reward"]["score"] == again.score
            scores.add(again.score)
    assert scores == {0.0, 1.0}


def test_the_reported_advantages_are_those_of_the_dumped_groups(trained, metrics):
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


def test_the_sampler_is_the_old_policy_and_agrees_with_the_actor(trained, metrics, smollm2_tokenizer):
    for step in (1, 2):
        assert abs(metrics[step][f"{CORR}/kl"]) < 1e-4
        assert metrics[step]["actor/pg_clipfrac"] == 0
        # Both are means of -log p, ours over all sampled tokens, veRL's over the rows' means: a row weighs
        # as many times as much in ours as it is longer than the mean row. Lengths are those of the texts,
        # whose tokens may be others than were sampled.
        turns = [line["trajectory"]["turns"] for line in trained.lines(f"dumps/step_{step:04d}.jsonl")]
        tokens = [sum(len(smollm2_tokenizer(turn["text"])["input_ids"]) + 1 for turn in row) for row in turns]
        own, verls = (metrics[step][name] for name in ("drzero/collapse/entropy", f"{CORR}/rollout_log_ppl"))
        least, most = min(tokens) / np.mean(tokens), max(tokens) / np.mean(tokens)
        assert 0 < 0.7 * least * verls <= own <= 1.4 * most * verls


def test_the_run_leaves_one_moved_checkpoint_a_result_and_a_summary(trained, speaking_model, metrics):
    before = AutoModelForCausalLM.from_pretrained(speaking_model, dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(checkpoint_weights(trained, 2)[name], before[name])
    assert [path.name for path in trained.folder.glob("global_step_*")] == ["global_step_2"]
    result = read_result(trained.folder)
    assert result and result.outputs == {"checkpoint": trained.folder / "global_step_2"}
    assert result.tokens == sum(metrics[step]["perf/total_num_tokens"] for step in (1, 2))
    assert result.figures["validation_exact_match_last"] == metrics[2]["drzero/val/em"]
    assert "validation" in trained.out
    assert "pass" not in trained.out.partition("solver_iter1: 2 steps")[2][:300]
    assert json.loads((trained.folder / "summary.json").read_text())["figures"]["steps"] == 2


def test_the_data_is_drawn_in_the_order_of_an_unbroken_run(trained):
    group = trained.config.actor_rollout_ref.rollout.n
    batches = unbroken_order(trained.config, 2)
    drawn = [Counter({key: count * group for key, count in batch.items()}) for batch in batches]
    assert dumped_order(trained, (1, 2)) == drawn
