"""Which checkpoint a training run starts from, and the checkpoints it refuses to go on from."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from drzero.checkpoints.resume import choose_start, start_step
from drzero.recipe.errors import CheckError
from verl_ext.checkpoints import TRACKER, step_folder


def save(run: Path, step: int, model: Path, devices: int = 1, **changes: Any) -> None:
    """A checkpoint of `model` as far as its start is concerned, with changes to the model's config."""
    actor = step_folder(run, step) / "actor"
    (actor / "huggingface").mkdir(parents=True)
    config = json.loads((model / "config.json").read_text()) | changes
    (actor / "huggingface" / "config.json").write_text(json.dumps(config))
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": devices}))
    shards = (actor / f"model_world_size_{devices}_rank_{rank}.pt" for rank in range(devices))
    for path in (*shards, step_folder(run, step) / "data.pt"):
        zipfile.ZipFile(path, "w").close()  # as torch saves
    (run / TRACKER).write_text(str(step))


def config_of(folder: Path, model: Path, **changes: Any) -> DictConfig:
    """What `choose_start` reads of a challenger's config, of iteration 2 after 4 steps an iteration."""
    config = OmegaConf.create(
        {
            "run": {"dir": str(folder / "second")},
            "base_model": str(model),
            "method": "hrpo",
            "iteration": 2,
            "continue_from": str(folder / "first"),
            "data": {"train_files": "prompts.parquet", "train_batch_size": 8},
            "actor_rollout_ref": {"model": {"path": str(model)}},
            "trainer": {
                "resume_mode": "auto",
                "resume_from_path": None,
                "total_training_steps": 8,
                "n_gpus_per_node": 1,
                "nnodes": 1,
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def refusal(config: DictConfig) -> str:
    with pytest.raises(CheckError) as refused:
        choose_start(config)
    return str(refused.value)


def test_the_first_start_goes_on_from_the_last_iterations_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    save(tmp_path / "first", 4, tiny_model)
    config = config_of(tmp_path, tiny_model)
    choose_start(config)
    assert config.trainer.resume_mode == "resume_path"
    assert config.trainer.resume_from_path == str(tmp_path / "first" / "global_step_4")


def test_later_starts_go_on_from_the_runs_own_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    """Also when the last iteration's has been pruned since."""
    save(tmp_path / "second", 6, tiny_model)
    config = config_of(tmp_path, tiny_model)
    choose_start(config)
    assert config.trainer.resume_mode == "auto"


@pytest.mark.parametrize("change", [{"continue_from": None}, {"trainer__resume_mode": "disable"}])
def test_a_start_from_scratch_is_left_alone(tmp_path: Path, tiny_model: Path, change: dict[str, Any]) -> None:
    config = config_of(tmp_path, tiny_model, **change)
    before = config.copy()
    choose_start(config)
    assert config == before


def test_nothing_to_go_on_from_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "first").mkdir()
    message = refusal(config_of(tmp_path, tiny_model))
    assert f"there is no checkpoint in {tmp_path / 'first'}" in message and "continue_from=null" in message


@pytest.mark.parametrize("step", [8, 9])
def test_a_last_run_that_leaves_no_step_is_refused(tmp_path: Path, tiny_model: Path, step: int) -> None:
    save(tmp_path / "first", step, tiny_model)
    assert f"is at step {step} already" in refusal(config_of(tmp_path, tiny_model))


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 65}, {"num_hidden_layers": 3}, {"vocab_size": 9}, {"architectures": ["Other"]}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("run", ["first", "second"])
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    tmp_path: Path, tiny_model: Path, run: str, change: dict[str, Any]
) -> None:
    save(tmp_path / run, 4, tiny_model, **change)
    message = refusal(config_of(tmp_path, tiny_model))
    assert str(tmp_path / run / "global_step_4") in message and "Set base_model" in message
    assert next(iter(change)) in message


def test_a_checkpoint_for_another_number_of_devices_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    save(tmp_path / "first", 4, tiny_model, devices=8)
    message = refusal(config_of(tmp_path, tiny_model))
    assert "shards for 8 devices, and this run has 1" in message


def test_a_recorded_checkpoint_that_is_gone_is_refused_and_not_trained_anew(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / TRACKER).write_text("6")
    assert "it is missing or incomplete" in refusal(config_of(tmp_path, tiny_model))


@pytest.mark.parametrize(
    ("run", "advice"), [("second", "set another run.name"), ("first", "set continue_from=null")]
)
def test_a_refused_checkpoint_comes_with_a_way_out_that_a_loop_has_too(
    tmp_path: Path, tiny_model: Path, run: str, advice: str
) -> None:
    (tmp_path / run).mkdir()
    (tmp_path / run / TRACKER).write_text("4")
    message = refusal(config_of(tmp_path, tiny_model))
    assert advice in message and f"(in a loop: --from {run})" in message


@pytest.mark.parametrize(
    ("key", "was"),
    [("base_model", "other"), ("method", "grpo"), ("iteration", 1), ("data.train_batch_size", 4)],
)
def test_a_folder_with_another_runs_checkpoint_is_refused(
    tmp_path: Path, tiny_model: Path, key: str, was: Any
) -> None:
    config = config_of(tmp_path, tiny_model)
    before = config.copy()
    OmegaConf.update(before, key, was)
    save(tmp_path / "second", 6, tiny_model)
    OmegaConf.save(before, tmp_path / "second" / "resolved.yaml")
    message = refusal(config)
    assert f"holds a run with {key}={was}" in message and "run.name" in message


RESOLVED = {
    **{"a list": b"- a", "one value": b"5", "bytes": b"base_model: \xff", "zeros": b"\0" * 9},
    **{"cut off": b'a: "b', "nested": b"[" * 10_000, "interpolation": b"base_model: ${nope}"},
    **{"a tag": b"a: !!python/name:os.system", "other kinds": b"data: [1]", "twice": b"a: 1\na: 2"},
}


@pytest.mark.parametrize("damaged", RESOLVED.values(), ids=RESOLVED)
def test_damaged_settings_of_the_last_start_are_refused_by_name(
    tmp_path: Path, tiny_model: Path, damaged: bytes
) -> None:
    save(tmp_path / "second", 6, tiny_model)
    (tmp_path / "second" / "resolved.yaml").write_bytes(damaged)
    assert f"{tmp_path}/second/resolved.yaml (the settings of" in refusal(config_of(tmp_path, tiny_model))


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, None], ids=repr)
def test_a_damaged_model_config_in_a_checkpoint_is_refused_by_name(
    tmp_path: Path, tiny_model: Path, damaged: bytes | None
) -> None:
    save(tmp_path / "second", 6, tiny_model)
    path = step_folder(tmp_path / "second", 6) / "actor" / "huggingface" / "config.json"
    path.unlink()
    if damaged is None:
        os.mkfifo(path)
    else:
        path.write_bytes(damaged)
    assert str(tmp_path / "second" / "global_step_6") in refusal(config_of(tmp_path, tiny_model))


@pytest.mark.parametrize(
    ("mode", "path", "step"),
    [("auto", None, None), ("disable", None, 0), ("resume_path", "runs/other/global_step_12/", 12)],
)
def test_the_step_that_the_settings_say_a_run_starts_at(
    mode: str, path: str | None, step: int | None
) -> None:
    trainer = {"resume_mode": mode, "resume_from_path": path}
    assert start_step(OmegaConf.create({"trainer": trainer})) == step
