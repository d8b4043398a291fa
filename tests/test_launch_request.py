"""A launch resolved: run file < environment default < flag."""

import dataclasses
import pickle

import pytest

from launch.arguments import parse
from launch.errors import LaunchError
from launch.request import resolve
from pipeline.compose import compose_stage


def launch(line, tmp_path=None, file=""):
    words = line.split()
    if file:
        (tmp_path / "run.yaml").write_text(file)
        words += ["--config-path", str(tmp_path / "run.yaml")]
    return resolve(parse(["--action", *words]))


def test_a_stage_becomes_the_words_that_are_typed_locally():
    request = launch("challenger --iteration 2 --model qwen2.5-7b --steps 3 +trainer.foo=1")
    assert request.command == (
        *("challenger", "compute=8xh100", "model=qwen2.5-7b", "iteration=2", "steps_per_iteration=3"),
        "+trainer.foo=1",
    )
    assert (request.name, request.preflight) == ("challenger_iter2", True)


@pytest.mark.parametrize(
    ("line", "file", "model"),
    [
        ("challenger", "model: qwen3-8b", "model=qwen3-8b"),
        ("challenger", "{model: qwen3-8b, env: own}", "model=qwen3-8b"),
        ("challenger --env demo", "model: qwen3-8b", None),
        ("challenger --env demo", "{model: qwen3-8b, models_by_env: {demo: qwen2.5-3b}}", "model=qwen2.5-3b"),
        ("challenger --env demo --model qwen3-14b", "{models_by_env: {demo: qwen2.5-3b}}", "model=qwen3-14b"),
        ("challenger --model Qwen/Qwen2.5-0.5B-Instruct", "", "base_model=Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_the_flags_model_takes_precedence_over_the_environments_and_that_over_the_files(
    tmp_path, line, file, model
):
    chosen = [w for w in launch(line, tmp_path, file).command if w.startswith(("model=", "base_model="))]
    assert chosen == ([model] if model else [])


def test_a_run_files_machine_is_changed_by_flags_and_overrides(tmp_path):
    file = "compute: {base: a100-40gb, timeout: 7200, max_usd: 30}"
    request = launch("challenger --gpu-type L40S compute.max_usd=5", tmp_path, file)
    assert request.compute.modal_options()["gpu"] == "L40S:1"
    assert (request.compute.timeout, request.compute.max_usd) == (7200, 5)
    assert "compute.max_usd=5" in request.command


def test_another_compute_file_changes_the_machine_and_nothing_else(tmp_path):
    line = "challenger --iteration 2 trainer.save_freq=5"
    one, two = (launch(line, tmp_path, f"compute: {name}") for name in ("single_h100", "a10g"))
    assert one.compute != two.compute
    assert [w for w in one.command if "compute" not in w] == [w for w in two.command if "compute" not in w]
    assert (one.name, one.preparations) == (two.name, two.preparations)


def test_smoke_ends_after_half_an_hour_by_default():
    assert launch("smoke").compute.timeout == 1800
    assert launch("smoke --gpu-type L4").compute.timeout == 1800
    assert launch("smoke compute.timeout=3600").compute.timeout == 3600


def test_a_machine_named_among_a_run_files_overrides_is_taken_unless_another_is_typed(tmp_path):
    file = "overrides: [compute=a10g]"
    assert launch("challenger", tmp_path, file).compute.name == "a10g"
    assert launch("challenger compute=t4", tmp_path, file).compute.name == "t4"


def test_smoke_is_three_steps_through_sglang_on_one_gpu():
    request = launch("smoke")
    assert request.compute.modal_options()["gpu"] == "A10G:1"
    assert {"solver.engine=sglang", "trainer.total_training_steps=3"} <= set(request.command)
    assert request.preparations == (("demo-data",),)


def test_the_demo_environment_makes_its_world_first():
    assert launch("challenger --env demo").preparations == (("demo-data",),)
    assert launch("challenger").preparations == ()
    assert launch("prepare-data --env demo").command == ("demo-data",)


def test_hop_ratio_names_prompts_and_their_file():
    assert "hop_ratio=[1,1]" in launch("prepare-data --hop-ratio 1:1").command
    assert any("zero_ratio11.parquet" in word for word in launch("challenger --hop-ratio 1:1").command)


@pytest.mark.parametrize(
    ("line", "file", "message"),
    [
        ("challenger --model qwen3-9b", "", "did you mean 'qwen3-8b'"),
        ("challenger --env dem", "", "did you mean 'demo'"),
        ("prepare-data --hop-ratio four", "", "give the weights"),
        ("solver --hop-ratio 1:1", "", "not solver"),
        ("challenger --num-examples 3", "", "--num-examples is for evaluate"),
        ("challenger", "modle: x", "modle: no such key: did you mean 'model'?"),
        ("challenger", "steps: many", "steps: 'many' is not int"),
        ("challenger", "image: {pypi: [x]}", "image.pypi"),
        ("challenger", "compute: {base: a10g, tmeout: 3}", "did you mean 'timeout'"),
        ("challenger", "a: [", "not YAML"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path, line, file, message):
    with pytest.raises(LaunchError) as refused:
        launch(line, tmp_path, file)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_a_flash_attention_wheel_the_actor_gets_torchs_own(monkeypatch):
    monkeypatch.setattr("launch.image.pins.FLASH_ATTN_WHEELS", ())
    config = compose_stage("challenger", launch("challenger").command[1:])
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"


def test_a_request_survives_the_wire():
    request = launch("evolve --env demo loop=demo")
    assert pickle.loads(pickle.dumps(request)) == request
    assert pickle.loads(pickle.dumps(request)).next_part().id == request.id


def test_the_next_call_gets_the_secrets_that_were_found_at_the_start():
    request = dataclasses.replace(launch("challenger"), secrets=("wandb-secret",))
    assert pickle.loads(pickle.dumps(request)).next_part().secrets == ("wandb-secret",)
