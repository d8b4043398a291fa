"""The estimate: where step times come from, and what money makes of them."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from drzero.ops.records import append_json_lines
from drzero.preflight.compute import check_together
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import Estimate, estimate, pace_of, step_parts, together
from drzero.preflight.finding import Finding
from drzero.preflight.machine import declared_machine, known_gpu
from drzero.recipe.compose import compose_plain, compose_stage, resolve
from drzero.recipe.gpu_prices import GPUS, usd_per_hour


@pytest.fixture(scope="module")
def base():
    return compose_plain("challenger", ["hardware=8xh100", "compute=8xh100", "model=qwen2.5-7b"])


def context_of(base: DictConfig, folder: Path, **changes: object) -> CheckContext:
    return context_at("challenger", base.copy(), folder, **changes)


def context_at(stage: str, config: DictConfig, folder: Path, **changes: object) -> CheckContext:
    OmegaConf.update(config, "paths.checkpoints", str(folder))
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    resolved = resolve(config)
    machine = declared_machine(resolved, starting=False)
    return CheckContext(resolved, stage, machine, False, False, Readings())


def of(base: DictConfig, folder: Path, **changes: object) -> Estimate:
    found = estimate(context_of(base, folder, **changes))
    assert found is not None
    return found


def run_earlier(folder, config, seconds, name="challenger_iter1", parts=None):
    """A run folder as an earlier start leaves it; `parts`: seconds of sampling and of the update."""
    run = folder / name
    (run / "metrics").mkdir(parents=True)
    OmegaConf.save(config, run / "resolved.yaml")
    each = dict(zip(("timing_s/gen", "timing_s/update_actor"), parts or (), strict=False))
    lines = [
        json.dumps({"step": step, "data": {"training/global_step": step, "timing_s/step": time} | each})
        for step, time in enumerate(seconds, start=1)
    ]
    (run / "metrics" / "attempt_001.jsonl").write_text("\n".join(lines) + "\n")


def test_the_rate_is_that_of_gpus_cores_and_memory():
    assert usd_per_hour(GPUS["H100"], 8, 0, 0) == pytest.approx(31.59, abs=0.01)
    assert usd_per_hour(None, 0, 10, 100) == pytest.approx(10 * 0.0472 + 100 * 0.008)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"compute__region": "eu"}, 1.5),
        ({"compute__region": "us-east"}, 1.75),
        ({"compute__provider": "local"}, 1),  # hired, and run on it oneself
        ({"compute__provider": "local", "compute__type": None}, 0),  # one's own
    ],
)
def test_a_machine_has_the_price_of_its_region_and_ones_own_has_none(base, tmp_path, changes, factor):
    price = of(base, tmp_path).usd_per_hour
    assert of(base, tmp_path, **changes).usd_per_hour == pytest.approx(factor * price) and price > 0


@pytest.mark.parametrize(
    "name", ["T4", "l4", "A10", "A10G", "L40S", "A100", "A100-80GB", "RTX-PRO-6000", "H100!", "B200+", "B300"]
)
def test_every_name_that_modal_has_for_a_gpu_is_known(name):
    assert known_gpu("compute.type", name)


def test_without_an_earlier_run_the_step_time_is_assumed_and_a_range(base, tmp_path):
    found = of(base, tmp_path)
    assert found.source.startswith("assumed") and found.high_s > 2 * found.low_s
    assert found.low_s < found.expected_s < found.high_s
    assert "rates of" in str(found) and "$" in str(found)


def test_an_earlier_start_of_the_run_measures_it_without_its_first_step(base, tmp_path):
    config = context_of(base, tmp_path).config
    run_earlier(tmp_path, config, [500, 60, 50, 70])
    found = of(base, tmp_path)
    assert found.source == "measured in challenger_iter1; 50 steps of 50 to 70 s"
    assert found.low_s == pytest.approx(90 + 50 * 50)


@pytest.mark.parametrize(
    ("steps", "shown"),
    [([500, 60, 50], "50 to 60 s"), ([9, 10, 90], "29 to 87 s"), ([500, 60], None), ([], None)],
)
def test_two_steps_after_the_first_measure_and_span_a_factor_of_three_at_most(base, tmp_path, steps, shown):
    run_earlier(tmp_path, context_of(base, tmp_path).config, steps)
    found = of(base, tmp_path, iteration=2)
    assert found.source.startswith("measured in challenger_iter1" if shown else "assumed")
    assert shown is None or shown in found.detail


@pytest.mark.parametrize(
    ("changes", "rollouts", "update"),
    [
        ({"data__train_batch_size": 128}, 0.5, 0.5),
        ({"compute__count": 4, "trainer__n_gpus_per_node": 4, "machine__gpus": 4}, 2, 2),
        ({"compute__type": "H200"}, 1, 1),
        ({"compute__type": "A100-80GB"}, 989 / 312, 989 / 312),
        ({"data__max_response_length": 5120}, 2, (1536 + 5120) / (1536 + 2560)),
    ],
)
def test_a_run_of_another_batch_or_machine_is_scaled_part_by_part(base, tmp_path, changes, rollouts, update):
    run_earlier(tmp_path, context_of(base, tmp_path).config, [500, 60, 50], parts=(20, 25))
    pace = pace_of(context_of(base, tmp_path, **changes))
    assert pace.basis == "scaled by weights and tokens over the GPUs' bfloat16 peak from"
    assert pace.run == "challenger_iter1 (8 × H100, Modal)"
    middles = {name: math.sqrt(part[0] * part[1]) for name, part in pace.parts.items()}
    assert middles["update"] == pytest.approx(25 * update)
    assert middles["rest"] == pytest.approx(10)  # neither batch nor GPUs change it
    if changes.keys() != {"data__max_response_length"}:  # attempts have another length
        assert middles["rollouts"] + middles["attempts"] == pytest.approx(20 * rollouts)
    found = of(base, tmp_path, **changes)
    assert "trainer.total_training_steps=3" in found.advice and found.high_s < 4 * found.low_s
    assert pace.step[1] == pytest.approx(3 * pace.step[0])


def test_the_newest_run_is_scaled_but_one_of_the_same_batch_and_machine_goes_before_it(base, tmp_path):
    changes = {"old": 128, "new": 64, "same": 256}
    for place, (name, size) in enumerate(changes.items()):
        run_earlier(
            tmp_path, context_of(base, tmp_path, data__train_batch_size=size).config, [9, 60, 50], name
        )
        os.utime(tmp_path / name / "resolved.yaml", (place, place))
        found = of(base, tmp_path)
        assert found.run.split()[0] == name and found.basis.startswith("measured") == (name == "same")
    os.utime(tmp_path / "old" / "resolved.yaml")
    assert of(base, tmp_path).run == "same"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_model", "other/model"),
        ("method", "grpo"),
        ("actor_rollout_ref.rollout.name", "reference"),
        ("machine.device", "cpu"),
        (None, "no mapping"),
        (None, "{damaged"),
        (None, "base_model: x"),
    ],
)
def test_a_run_of_another_model_method_or_engine_measures_nothing(base, tmp_path, key, value):
    config = context_of(base, tmp_path).config
    if key:
        OmegaConf.update(config, key, value)
    run_earlier(tmp_path, config, [500, 60, 50])
    if key is None:
        (tmp_path / "challenger_iter1" / "resolved.yaml").write_text(value)
    assert of(base, tmp_path).basis.startswith("assumed")


def test_a_model_folder_of_another_machine_is_the_model_of_its_name(base, tmp_path):
    config = context_of(base, tmp_path).config
    OmegaConf.update(config, "base_model", "/volume/models/Qwen2.5-7B-Instruct")
    run_earlier(tmp_path, config, [500, 60, 50])
    assert of(base, tmp_path).source.startswith("measured in challenger_iter1")


def events_of(folder, *events):
    for kind, component, at in events:
        event = {"time": at, "kind": kind, "component": component, "text": "", "pid": 1}
        append_json_lines(folder / "logs" / "events.jsonl", event)


UP = [("start", "retrieval", 1000), ("start", "solver", 1001), ("ready", "solver", 1020)]
AGAIN = [("ready", "retrieval", 1024), ("crash", "retrieval", 1030), ("ready", "retrieval", 1060)]


@pytest.mark.parametrize(
    ("events", "has_result", "is_measured"),
    [
        ([*UP, *AGAIN, ("stopped", "solver", 1324), ("stopped", "retrieval", 1330)], True, True),
        ([*UP, *AGAIN, ("stopped", "solver", 1324)], False, False),
        ([*UP, *AGAIN], True, False),
        ([*UP, ("stopped", "solver", 1050), *UP, ("stopped", "solver", 1324)], True, False),  # a resumed one
        ([], True, False),
    ],
)
def test_an_evaluation_takes_as_long_as_the_last_one_that_was_done_in_one_start(
    tmp_path, events, has_result, is_measured
):
    (tmp_path / "chains.jsonl").write_text('{"question": "Who is it?", "answer": "Vell"}\n')
    config = compose_plain("evaluate", ["hardware=cpu", "model=qwen2.5-3b"])
    ctx = context_at("evaluate", config, tmp_path, benchmarks=[str(tmp_path / "chains.jsonl")])
    earlier = tmp_path / "evaluate_iter0"
    earlier.mkdir()
    OmegaConf.save(ctx.config, earlier / "resolved.yaml")
    events_of(earlier, *events)
    if has_result:
        (earlier / "result.json").write_text("{}")
    found = estimate(ctx)
    assert found.basis == (
        "measured in" if is_measured else "assumed: no earlier run of this model and engine"
    )
    assert (found.expected_s == pytest.approx(324)) == is_measured  # 24 s of start, 300 s of conversations


def test_a_trainings_start_is_measured_up_to_its_first_rollout(base, tmp_path):
    run_earlier(tmp_path, context_of(base, tmp_path).config, [9, 60, 60])
    events_of(tmp_path / "challenger_iter1", ("start", "retrieval", 1000), ("start", "trainer", 1100))
    beats = [(900, "rollout"), (1150, "start-up"), (1300, "rollout"), (1400, "rollout")]
    lines = (json.dumps({"time": at, "step": 1, "phase": phase}) for at, phase in beats)
    (tmp_path / "challenger_iter1" / "heartbeats.jsonl").write_text("\n".join(lines) + "\n")
    assert of(base, tmp_path).low_s == pytest.approx(300 / math.sqrt(3) + 50 * 60)


def test_gpus_that_only_sample_update_nothing_and_the_others_sample_nothing(tmp_path):
    parts = {}
    for serving in (None, 4, 2):
        config = compose_stage("solver", ["compute=8xh100", f"machine.serve_gpus={serving or 'null'}"])
        parts[serving] = step_parts(context_at("solver", config, tmp_path))
    for part, times in {"update": {4: 2, 2: 8 / 6}, "rollouts": {4: 2, 2: 4}}.items():
        for serving, longer in times.items():
            assert parts[serving][part] == pytest.approx(longer * parts[None][part])


def test_a_later_challenger_of_a_loop_has_its_own_steps_alone(base, tmp_path):
    later = context_of(base, tmp_path, iteration=3)
    assert "; 150 steps" in str(estimate(later))  # by itself it would have to do all of them
    assert "; 50 steps" in str(estimate(replace(later, ahead=True)))
    Path(later.config.continue_from).mkdir(parents=True)  # that one has ended before its first checkpoint
    assert "; 50 steps" in str(estimate(replace(later, ahead=True)))


def test_an_evaluation_counts_the_questions_of_the_hops_that_it_asks(tmp_path):
    chains = tmp_path / "chains.jsonl"
    records = ({"hop": 1 + n % 3, "question": f"Who is {n}?", "answer": "Vell"} for n in range(30))
    chains.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = compose_plain("evaluate", ["hardware=cpu", "model=qwen2.5-3b", f"benchmarks=[{chains}]"])
    for hops, of_each, asked in ((None, None, 30), ([1, 2], None, 20), ([1, 2], 7, 14), ([3], 99, 10)):
        found = estimate(
            context_at("evaluate", config.copy(), tmp_path, hops=hops, questions_per_benchmark=of_each)
        )
        assert found and found.detail == f"{asked} conversations"
    chains.write_text("damaged\n")
    assert estimate(context_at("evaluate", config, tmp_path)) is None


def test_a_larger_model_takes_longer_to_merge(tmp_path):
    small, large = (
        estimate(context_at("merge", compose_plain("merge", ["hardware=cpu", f"model={model}"]), tmp_path))
        for model in ("smollm2-135m", "qwen2.5-7b")
    )
    assert small and large and large.low_s > 2 * small.low_s
    assert small.low_s < 42 < small.high_s  # as measured on two cores
    assert str(small).startswith("22 s to 2 min")


def together_findings(limit: float | None, *estimates: Estimate | None) -> list[Finding]:
    compute = OmegaConf.create({"max_usd": limit, "timeout": 4 * 3600})
    return list(check_together(compute, together(estimates)))


def test_the_stages_of_a_loop_are_added_up_against_the_limit():
    one = Estimate(3600, 4 * 3600, "assumed: x", 10)
    assert [finding.severity for finding in together_findings(45, one, one, None)] == ["warning"]
    [too_dear] = together_findings(39, one, one)
    assert (too_dear.severity, too_dear.key) == ("error", "compute.max_usd") and "$40" in too_dear.why
    assert [finding.key for finding in together_findings(None, one, one, one)] == ["compute.timeout"]
    assert together_findings(1, None) == []


def test_a_loops_estimate_says_what_its_stages_rest_on_and_how_the_first_is_narrowed():
    first = Estimate(3600, 4 * 3600, "assumed: x", 10, advice="run three steps")
    known = Estimate(3600, 2 * 3600, "measured in", 10, "a")
    assert str(together([known, first, replace(first, advice="no"), None])) == (
        "3.0 h to 10.0 h, $30 to $100 ($10.00/h, rates of 2026-09-26), "
        "3 of 4 stages, 1 measured in a, 2 assumed; the others need the output of earlier stages; "
        "run three steps"
    )
    assert (
        str(together([replace(known, usd_per_hour=0)])) == "60 min to 2.0 h, 1 of 1 stages, all measured in a"
    )
