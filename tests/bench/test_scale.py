"""The simulation of docs/scale.md: what grows with GPUs and passages, and how far a run is from it."""

import json

import numpy as np
import pytest
from omegaconf import OmegaConf

from bench import scale
from drzero.recipe.compose import compose_stage, resolve


@pytest.fixture(scope="module")
def solver():
    return {gpus: scale.simulate("solver", gpus) for gpus in (1, 2, 8, 16, 64)}


def test_twice_the_gpus_of_one_machine_halve_what_waits_for_operations(solver):
    assert solver[1].limits["update"] == "operations"
    assert 2 * solver[2].parts["update"] == pytest.approx(solver[1].parts["update"])


def test_no_number_of_gpus_ends_a_rollout_before_its_longest_conversation(solver):
    assert solver[64].limits["rollouts"] == "the longest conversation"
    assert solver[64].parts["rollouts"] == pytest.approx(solver[16].parts["rollouts"])


def test_a_second_machine_pays_for_the_network(solver):
    assert solver[16].limits["update"] == "the network between machines"
    assert scale.middle(solver[16].parts["update"]) > scale.middle(solver[8].parts["update"]) / 2


def test_the_price_is_that_of_all_machines(solver):
    assert solver[16].usd_per_hour == pytest.approx(2 * solver[8].usd_per_hour)


def test_a_gpu_that_shares_the_state_with_none_has_more_in_memory(solver):
    assert solver[1].gpu_gib > solver[2].gpu_gib


@pytest.mark.parametrize(
    ("passages", "limit"),
    [(10**4, "none"), (21 * 10**6, "the graph's two cores"), (10**8, "memory of the service")],
)
def test_the_limit_of_an_index_is_named(passages, limit):
    assert scale.limit_of(scale.Index(passages), busiest=100) == limit


def test_a_service_that_answers_too_few_is_a_limit():
    index = scale.Index(10**6)
    assert scale.limit_of(index, 2 * scale.middle(index.queries_per_second)) == "queries a second"


def test_a_run_is_shown_next_to_its_simulation(tmp_path):
    config = resolve(compose_stage("solver", ["hardware=cpu", f"paths.checkpoints={tmp_path}"]))
    (tmp_path / "metrics").mkdir()
    OmegaConf.save(config, tmp_path / "resolved.yaml")
    steps = [
        {
            "step": step,
            "data": {"training/global_step": step, "timing_s/step": time, "timing_s/gen": time / 2},
        }
        for step, time in enumerate((30.0, 10.0, 20.0), start=1)
    ]
    (tmp_path / "metrics" / "attempt_001.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    rows = [line.split("|")[1:4] for line in scale.compare_run(tmp_path).splitlines()[2:]]
    measured = {part.strip(): shown.strip() for part, shown, _ in rows}
    assert measured == {"gen": "10.0 (5.0–15.0)", "update_actor": "–", "step": "20.0 (10.0–30.0)"}
    assert all(np.isfinite(float(simulated.split()[0].replace(",", ""))) for *_, simulated in rows)
