"""The estimate: where step times come from, and what money makes of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from drzero.preflight.compute import check_together
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import Estimate, estimate, step_parts
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


def run_earlier(
    folder: Path, config: DictConfig, seconds: list[float], name: str = "challenger_iter1"
) -> None:
    """A run folder as an earlier start leaves it."""
    run = folder / name
    (run / "metrics").mkdir(parents=True)
    OmegaConf.save(config, run / "resolved.yaml")
    lines = [
        json.dumps({"step": step, "data": {"training/global_step": step, "timing_s/step": time}})
        for step, time in enumerate(seconds, start=1)
    ]
    (run / "metrics" / "attempt_001.jsonl").write_text("\n".join(lines) + "\n")


def test_the_rate_is_that_of_gpus_cores_and_memory():
    assert usd_per_hour(GPUS["H100"], 8, 0, 0) == pytest.approx(31.59, abs=0.01)
    assert usd_per_hour(None, 0, 10, 100) == pytest.approx(10 * 0.0472 + 100 * 0.008)


def test_a_region_costs_more_and_a_narrow_one_most():
    base, broad, narrow = (usd_per_hour(GPUS["H100"], 1, 4, 8, region) for region in (None, "us", "us-east"))
    assert (broad / base, narrow / base) == (1.5, 1.75)


def test_the_region_of_a_machine_is_in_its_price(base, tmp_path):
    anywhere, there = of(base, tmp_path), of(base, tmp_path, compute__region="eu")
    assert there.usd_per_hour == pytest.approx(1.5 * anywhere.usd_per_hour)


@pytest.mark.parametrize(
    "name", ["T4", "l4", "A10", "A10G", "L40S", "A100", "A100-80GB", "RTX-PRO-6000", "H100!", "B200+", "B300"]
)
def test_every_name_that_modal_has_for_a_gpu_is_known(name):
    assert known_gpu("compute.type", name)


def test_ones_own_machine_costs_nothing(base, tmp_path):
    assert of(base, tmp_path, compute__provider="local", compute__type=None).usd_per_hour == 0


def test_hired_machines_that_one_runs_on_oneself_have_their_price(base, tmp_path):
    assert of(base, tmp_path, compute__provider="local").usd_per_hour == of(base, tmp_path).usd_per_hour > 0


def test_without_an_earlier_run_the_step_time_is_assumed_and_a_range(base, tmp_path):
    found = of(base, tmp_path)
    assert found.source.startswith("assumed") and found.high_s > 2 * found.low_s
    assert found.low_s < found.expected_s < found.high_s
    assert "rates of" in str(found) and "$" in str(found)


def test_an_earlier_start_of_the_run_measures_it_without_its_first_step(base, tmp_path):
    config = context_of(base, tmp_path).config
    run_earlier(tmp_path, config, [500, 60, 50, 70])
    found = of(base, tmp_path)
    assert found.source.startswith("measured") and "50 to 70 s" in found.source
    assert found.low_s == pytest.approx(90 + 50 * 50)


def test_the_last_iteration_measures_the_next(base, tmp_path):
    run_earlier(tmp_path, context_of(base, tmp_path).config, [500, 60, 50])
    assert of(base, tmp_path, iteration=2).source.startswith("measured")


@pytest.mark.parametrize(
    ("key", "value"),
    [("data__train_batch_size", 128), ("compute__type", "H200"), ("base_model", "other/model")],
)
def test_another_batch_machine_or_model_measures_nothing(base, tmp_path, key, value):
    run_earlier(tmp_path, context_of(base, tmp_path, **{key: value}).config, [500, 60, 50])
    assert of(base, tmp_path).source.startswith("assumed")


def test_twice_the_steps_take_twice_as_long_but_for_the_start(base, tmp_path):
    once, twice = (of(base, tmp_path, trainer__total_training_steps=n) for n in (50, 100))
    assert twice.low_s - 90 == pytest.approx(2 * (once.low_s - 90))


def test_more_gpus_are_faster(base, tmp_path):
    few = of(base, tmp_path, trainer__n_gpus_per_node=4, compute__count=4)
    assert few.expected_s > of(base, tmp_path).expected_s


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
        assert found and found.source == f"assumed: {asked} conversations"
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
    return list(check_together(compute, estimates))


def test_the_stages_of_a_loop_are_added_up_against_the_limit():
    one = Estimate(3600, 4 * 3600, "assumed: x", 10)
    fine = together_findings(45, one, one, None)
    assert [finding.severity for finding in fine] == ["note", "warning"]
    assert "2.0 h to 8.0 h, $20 to $80" in fine[0].why and "1 more cannot be estimated" in fine[0].why
    assert "2 stages together, none of them measured" in fine[0].why
    [_, too_dear] = together_findings(39, one, one)
    assert (too_dear.severity, too_dear.key) == ("error", "compute.max_usd") and "$40" in too_dear.why
    assert [finding.key for finding in together_findings(None, one, one, one)] == ["cost", "compute.timeout"]
    assert together_findings(1, None) == []


def test_the_expected_cost_is_between_the_ends():
    found = Estimate(3600, 4 * 3600, "assumed: x", 10)
    assert found.usd(found.expected_s) == pytest.approx(20)
    assert math.isclose(found.expected_s, 7200)
