"""A run file in the words of the Modal guide: every key of it, and the table of docs/modal.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from drzero.launch.arguments import parse
from drzero.launch.errors import LaunchError
from drzero.launch.known_keys import check_keys
from drzero.launch.request import resolve
from drzero.launch.runfile import read_runfile
from drzero.launch.verifiers_guide_format import KEYS, translate
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage

DOCS = Path(__file__).parents[2] / "docs" / "modal.md"
AS_WRITTEN = """
modal:
  cpus: 8.0
  memory: 32768  # MB
  gpu:
    count: 1
    type: "A100-40GB"
  timeout: 14400
model:
  base_model: "Qwen/Qwen2.5-1.5B-Instruct"
  max_token_length: 4096
  dtype: "bfloat16"
  attn_implementation: "sdpa"
  overrides:
    vf-bfcl-single-turn: "Salesforce/xLAM-2-3b-fc-r"
training:
  environment: "vf-wordle"
  steps: 200
  batch_size: 8
  gradient_accumulation_steps: 8
  learning_rate: 3e-6
  max_grad_norm: 0.1
vllm:
  gpu_memory_utilization: 0.5
  max_model_len: 4096
  block_size: 16
  enforce_eager: true
  enable_auto_tool_choice: true
  tool_call_parser: "hermes"
wandb:
  project: "verifiers"
  enabled: true
"""
"""The guide's example, to the letter."""
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
BECOMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "modal.cpus": (4.0, {"compute.cpu": 4.0}),
    "modal.memory": (65536, {"compute.memory": 65536}),
    "modal.gpu.type": ("L40S", {"compute.type": "L40S"}),
    "modal.gpu.count": (1, {"compute.count": 1}),
    "modal.timeout": (60, {"compute.timeout": 60}),
    "model.base_model": ("a/b-1B", {"model": "a/b-1B"}),
    "model.max_token_length": (3000, {"data.max_prompt_length": "1024", "data.max_response_length": "1976"}),
    "model.dtype": ("float16", {f"{ROLLOUT}.dtype": "float16", "solver.dtype": "float16"}),
    "model.attn_implementation": (
        "eager",
        {"++actor_rollout_ref.model.override_config.attn_implementation": "eager"},
    ),
    "model.overrides": ({"vf-wordle": "a/b-1B"}, {"models_by_env": {"vf-wordle": "a/b-1B"}}),
    "training.environment": ("vf-wordle", {"env": "vf-wordle"}),
    "training.steps": (7, {"steps": 7}),
    "training.batch_size": (16, {"data.train_batch_size": "2", f"{ROLLOUT}.n": "8"}),
    "training.gradient_accumulation_steps": (32, {"data.train_batch_size": "4", f"{ROLLOUT}.n": "8"}),
    "training.learning_rate": ("3e-6", {f"{ACTOR}.optim.lr": "3e-06"}),
    "training.max_grad_norm": (1, {f"{ACTOR}.grad_clip": "1"}),
    "vllm.gpu_memory_utilization": (
        0.4,
        {f"{ROLLOUT}.gpu_memory_utilization": "0.4", "solver.mem_fraction_static": "0.4"},
    ),
    "vllm.max_model_len": (1000, {"data.max_prompt_length": "500", "data.max_response_length": "500"}),
    "vllm.block_size": (16, {"rollout.server_args.page_size": "16", "solver.server_args.page_size": "16"}),
    "vllm.enforce_eager": (False, {f"{ROLLOUT}.enforce_eager": "false"}),
    "vllm.enable_auto_tool_choice": (True, {}),
    "vllm.tool_call_parser": ("llama3_json", {"environment.call_form": "llama3"}),
    "wandb.project": ("mine", {"trainer.project_name": "mine"}),
    "wandb.enabled": (False, {"trainer.logger": "[file,tensorboard]"}),
}
"""A value of each key, and all that it becomes."""


def nested(name: str, value: Any) -> dict[str, Any]:
    """A run file with nothing but this key."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """A translated run file: its keys, its machine's keys, and its overrides."""
    given = {key: value for key, value in values.items() if key not in ("compute", "overrides")}
    machine = {f"compute.{key}": value for key, value in values.get("compute", {}).items()}
    overrides = dict(word.split("=", 1) for word in values["overrides"])
    return given | machine | overrides


def test_every_key_of_the_guides_example_is_known_and_tried_here():
    assert [key.name for key in KEYS] == list(BECOMES)
    names = re.findall(r"^ *(\w+):", AS_WRITTEN, re.MULTILINE)
    parts = {part for key in KEYS for part in key.name.split(".")}
    assert set(names) - {"vf"} == parts


@pytest.mark.parametrize("name", BECOMES)
def test_each_key_becomes_what_it_is_here(name):
    value, becomes = BECOMES[name]
    translated = translate(nested(name, value), "run.yaml")
    of_section = {"rollout": "sglang"} if name.startswith("vllm.") else {}
    assert flat(translated) == {**of_section, **becomes}
    check_keys(translated["overrides"])


def test_the_table_of_the_documentation_has_each_key_and_what_it_is_here():
    page = re.sub(r"\[(`[^`]+`)\]\([^)]*\)", r"\1", DOCS.read_text())  # without its links
    rows = re.findall(r"^\| `((?:modal|model|training|vllm|wandb)\.[\w.]+)` \| (.+?) \|$", page, re.M)
    assert rows == [(key.name, key.ours) for key in KEYS]


def test_the_guides_example_is_launched_as_it_is_written(tmp_path):
    (tmp_path / "run.yaml").write_text(AS_WRITTEN)
    request = resolve(parse(["--action", "train", "--config-path", str(tmp_path / "run.yaml")]))
    machine = request.compute.modal_options()
    assert (machine["gpu"], machine["cpu"], machine["memory"]) == ("A100-40GB:1", 8, 32768)
    config = compose_stage("train", request.command[1:])
    rollout = config.actor_rollout_ref.rollout
    assert (config.environment.name, config.steps, config.base_model) == (
        *("wordle", 200),
        "Qwen/Qwen2.5-1.5B-Instruct",
    )
    assert config.data.train_batch_size * rollout.n == 64
    assert config.data.max_prompt_length + config.data.max_response_length == 4096
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.grad_clip) == (3e-6, 0.1)
    assert (rollout.name, rollout.enforce_eager, rollout.engine_kwargs.sglang.page_size) == (
        "sglang",
        True,
        16,
    )
    assert config.trainer.project_name == "verifiers" and "wandb" in config.trainer.logger


def test_its_file_starts_in_an_environment_that_needs_more_than_it_says(tmp_path):
    (tmp_path / "run.yaml").write_text(AS_WRITTEN)
    line = ["--action", "train", "--config-path", str(tmp_path / "run.yaml"), "--env", "vf-bfcl-single-turn"]
    request = resolve(parse(line))
    # xLAM was made from this Qwen, whose sizes are known without the hub.
    config = compose_stage("train", [*request.command[1:], "base_model=Qwen/Qwen2.5-3B-Instruct"])
    report = preflight(config, "train")
    assert report.errors == [] and report.ledger is not None and report.ledger.margin_gib > 1
    assert (request.compute.memory, config.data.max_prompt_length) == (40960, 3072)
    typed = resolve(parse([*line, "data.max_prompt_length=2048", "compute.memory=65536"]))
    assert typed.command[-1] == "data.max_prompt_length=2048" and typed.compute.memory == 65536


def test_its_parser_of_calls_is_not_taken_for_a_model_that_writes_others(tmp_path):
    (tmp_path / "run.yaml").write_text(AS_WRITTEN.replace("vf-wordle", "vf-bfcl-single-turn"))
    command = resolve(parse(["--action", "train", "--config-path", str(tmp_path / "run.yaml")])).command
    assert "base_model=Salesforce/xLAM-2-3b-fc-r" in command
    assert [word for word in command if word.startswith("environment.call_form=")][-1].endswith("=xlam")


def test_keys_of_ours_may_stand_beside_them_and_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "{modal: {timeout: 60}, compute: a10g, vllm: {block_size: 16}, overrides: [rollout=reference]}"
    )
    read = read_runfile(str(file))
    assert read.compute == {"base": "a10g", "timeout": 60}
    assert read.overrides[0] == "rollout=sglang" and read.overrides[-1] == "rollout=reference"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modal: {cpu: 8}", "modal.cpu: no such key (did you mean 'modal.cpus'?"),
        ("vllm: {enforce_eager: 1}", "vllm.enforce_eager: 1 is not bool"),
        ("training: {steps: true}", "training.steps: True is not int"),
        ("training: {learning_rate: small}", "training.learning_rate: 'small' is not int or float"),
        ("training: {batch_size: 3}", "= 3 are the rows of an update: make it a multiple of 8"),
        ("training: {batch_size: 1}", "= 1 are the rows of an update: make it a multiple of 8"),
        ("training: {batch_size: -8}", "= -8 are the rows of an update: make it a multiple of 8"),
        ("{vllm: {block_size: 16}, overrides: rollout=sglang}", "overrides: 'rollout=sglang' is not list"),
        ("{vllm: {block_size: 16}, overrides: }", "overrides: None is not list"),
    ],
)
def test_a_mistake_in_it_is_one_line(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(LaunchError) as refused:
        read_runfile(str(tmp_path / "run.yaml"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
