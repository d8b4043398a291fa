"""The machine of a launch: files, changes, and the same numbers for Modal and for the stage."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.launch.compute import for_gpus, load_compute
from drzero.launch.errors import LaunchError
from drzero.launch.image.pins import NEWER_CUDA
from drzero.recipe.compose import compose_stage
from drzero.recipe.gpu_prices import GPUS

FITTING = sorted(GPUS.keys() - NEWER_CUDA)
ASKED = ("8xh100", "4xa100-80gb", "2xa10g", "single_h100", "a100-40gb", "a10g", "t4", "cpu")


@pytest.mark.parametrize("name", ASKED)
def test_modal_and_the_stages_config_get_the_same_numbers(name):
    compute = load_compute(name)
    whole = compose_stage("merge", compute.overrides())
    config = whole.compute
    options = compute.modal_options()
    assert options["gpu"] == (f"{config.type}:{config.count}" if config.type else None)
    assert (options["cpu"], options["memory"], options["timeout"]) == (
        config.cpu,
        config.memory,
        config.timeout,
    )
    # A hung machine is paid for: resumed once, then stopped.
    assert (whole.watchdog.policy, whole.watchdog.resumes) == ("resume", 1)


def test_a_region_has_its_price():
    compute = load_compute("a10g")
    assert compute.changed(region="us-east").usd_per_hour == 1.75 * compute.usd_per_hour


def test_a_type_with_a_special_character_of_hydra_is_quoted():
    config = compose_stage("merge", load_compute("single_h100").changed(type="H100!").overrides())
    assert config.compute.type == "H100!"


def test_changed_values_reach_the_stages_config():
    compute = load_compute("8xh100").changed(type="A100-80GB", count=4, max_usd=50, timeout=7200)
    config = compose_stage("challenger", compute.overrides())
    assert (config.compute.type, config.compute.count, config.compute.max_usd) == ("A100-80GB", 4, 50)
    assert config.trainer.n_gpus_per_node == 4
    assert config.solver.tp_size * config.solver.dp_size == 4


@pytest.mark.parametrize("type_", NEWER_CUDA)
def test_a_gpu_for_which_the_images_cuda_is_too_old_is_refused(type_):
    with pytest.raises(LaunchError, match=re.escape(f"type is {type_}, for which Modal wants CUDA 13.1")):
        for_gpus(load_compute("8xh100"), type_.lower(), 1)


@given(type_=st.sampled_from(FITTING), count=st.integers(1, 4), start=st.sampled_from(ASKED))
def test_any_type_in_any_count_can_be_requested(type_, count, start):
    compute = for_gpus(load_compute(start), type_, count)
    assert compute.modal_options()["gpu"] == f"{type_}:{count}"
    assert compute.hardware == ("single_gpu" if count == 1 else "8xh100")


@pytest.mark.parametrize(("type_", "count"), [("A10G", 1), (None, 1), (None, 0), ("L4", 1)])
def test_other_gpus_leave_the_limit_of_what_is_paid_as_it_was(type_, count):
    limited = load_compute("8xh100").changed(max_usd=50, timeout=7200)
    changed = for_gpus(limited, type_, count)
    assert (changed.max_usd, changed.timeout) == (50, 7200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "A100-60GB"}, "did you mean 'A100-80GB'?"),
        ({"count": 9}, "1 to 8 of H100"),
        ({"type": "A10G", "count": 5}, "1 to 4 of A10G"),
        ({"timeout": 90000}, "1 to 86400 seconds"),
        ({"max_usd": 0}, "max_usd is 0"),
        ({"memroy": 1}, "did you mean 'memory'?"),
        ({"retries": 11}, "0 to 10"),
        ({"cpu": 0}, "cpu is 0"),
        ({"cpu": 400}, "cpu is 400"),
        ({"cpu": True}, "not a number of cores"),
        ({"memory": 10**6}, "memory is 1000000 MiB"),
        ({"region": "moon"}, "region is 'moon'"),
        ({"count": "two"}, "count is 'two', not a number of GPUs"),
        ({"max_usd": float("nan")}, "max_usd is nan"),
    ],
)
def test_a_machine_that_modal_does_not_offer_is_refused(change, message):
    with pytest.raises(LaunchError, match=message.replace("?", r"\?")):
        load_compute("8xh100").changed(**change)


def test_an_unknown_machine_names_the_nearest():
    with pytest.raises(LaunchError, match="did you mean '8xh100'"):
        load_compute("8xh10")
