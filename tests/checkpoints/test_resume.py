"""Which checkpoint a training run starts from, and which checkpoints it refuses."""

import json
import os
import shutil
import zipfile

import pytest
from omegaconf import DictConfig, OmegaConf

from drzero.checkpoints.resume import choose_start, start_step
from drzero.recipe.errors import CheckError
from verl_ext.checkpoints import TRACKER, step_folder


class World:
    """A challenger's second iteration of 4 steps, `second`, and the run before it, `first`."""

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        trainer = {"resume_mode": "auto", "resume_from_path": None, "total_training_steps": 8}
        self.config: DictConfig = OmegaConf.create(
            {
                "run": {"dir": str(folder / "second"), "name": "second"},
                "base_model": str(model),
                "method": "hrpo",
                "iteration": 2,
                "continue_from": str(folder / "first"),
                "data": {"train_files": "prompts.parquet", "train_batch_size": 8},
                "actor_rollout_ref": {"model": {"path": str(model)}},
                "trainer": {**trainer, "n_gpus_per_node": 1, "nnodes": 1},
            }
        )

    def save(self, run, step, devices=1, **changes):
        """Write the files of a checkpoint that a start reads, with changes to the model's config."""
        actor = step_folder(self.folder / run, step) / "actor"
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        config = json.loads((self.model / "config.json").read_text()) | changes
        (actor / "huggingface" / "config.json").write_text(json.dumps(config))
        (actor / "fsdp_config.json").write_text(json.dumps({"world_size": devices}))
        shards = (actor / f"model_world_size_{devices}_rank_{rank}.pt" for rank in range(devices))
        for path in (*shards, actor.parent / "data.pt"):
            zipfile.ZipFile(path, "w").close()  # as torch saves
        self.record(run, step)
        return actor

    def record(self, run, step):
        (self.folder / run).mkdir(exist_ok=True)
        (self.folder / run / TRACKER).write_text(str(step))

    def refusal(self):
        with pytest.raises(CheckError) as refused:
            choose_start(self.config)
        return str(refused.value)


@pytest.fixture
def world(tmp_path, tiny_model):
    return World(tmp_path, tiny_model)


def test_the_first_start_continues_from_the_last_iterations_checkpoint_and_later_ones_from_their_own(world):
    own = world.config.copy()
    world.save("first", 4)
    choose_start(world.config)
    assert world.config.trainer.resume_mode == "resume_path"
    assert world.config.trainer.resume_from_path == str(world.folder / "first" / "global_step_4")
    shutil.rmtree(world.folder / "first")
    world.save("second", 6)
    choose_start(own)
    assert own.trainer.resume_mode == "auto"


@pytest.mark.parametrize("change", [("continue_from", None), ("trainer.resume_mode", "disable")])
def test_a_start_from_scratch_is_left_alone(world, change):
    OmegaConf.update(world.config, *change)
    before = world.config.copy()
    choose_start(world.config)
    assert world.config == before


@pytest.mark.parametrize("step", [0, 8, 9])
def test_a_last_run_without_a_checkpoint_or_that_leaves_no_step_is_refused(world, step):
    if step:
        world.save("first", step)
    message = world.refusal()
    none = f"there is no checkpoint in {world.folder / 'first'}"
    assert (f"is at step {step} already" if step else none) in message
    assert ("continue_from=null" in message) == (not step)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 65), ("num_hidden_layers", 3), ("vocab_size", 9), ("architectures", ["Other"])],
)
@pytest.mark.parametrize("run", ["first", "second"])
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(world, run, key, value):
    world.save(run, 4, **{key: value})
    message = world.refusal()
    assert str(world.folder / run / "global_step_4") in message and "Set base_model" in message
    assert key in message


def test_a_checkpoint_for_another_number_of_devices_is_refused(world):
    world.save("first", 4, devices=8)
    assert "shards for 8 devices, and this run has 1" in world.refusal()


@pytest.mark.parametrize(
    ("run", "advice"), [("second", "set another run.name"), ("first", "set continue_from=null")]
)
def test_a_missing_recorded_checkpoint_is_refused_with_advice_for_a_loop_too(world, run, advice):
    world.record(run, 4)
    message = world.refusal()
    assert "it is missing or incomplete" in message
    assert advice in message and f"(in a loop: --from {run})" in message


@pytest.mark.parametrize(
    ("key", "was"),
    [("base_model", "other"), ("method", "grpo"), ("iteration", 1), ("data.train_batch_size", 4)],
)
def test_a_folder_with_another_runs_checkpoint_is_refused(world, key, was):
    before = world.config.copy()
    OmegaConf.update(before, key, was)
    world.save("second", 6)
    OmegaConf.save(before, world.folder / "second" / "resolved.yaml")
    message = world.refusal()
    assert f"holds a run with {key}={was}" in message and "run.name" in message


RESOLVED = {
    "a list": b"- a",
    "bytes": b"base_model: \xff",
    "cut off": b'a: "b',
    "nested": b"[" * 10_000,
    "interpolation": b"base_model: ${nope}",
    "a tag": b"a: !!python/name:os.system",
    "other kinds": b"data: [1]",
}


@pytest.mark.parametrize("damaged", RESOLVED.values(), ids=RESOLVED)
def test_damaged_settings_of_the_last_start_are_refused_by_name(world, damaged):
    world.save("second", 6)
    path = world.folder / "second" / "resolved.yaml"
    path.write_bytes(damaged)
    assert f"{path} (the settings of" in world.refusal()


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"\xff", b"[" * 100_000, None], ids=repr)
def test_a_damaged_model_config_in_a_checkpoint_is_refused_by_name(world, damaged):
    path = world.save("second", 6) / "huggingface" / "config.json"
    path.unlink()
    if damaged is None:
        os.mkfifo(path)
    else:
        path.write_bytes(damaged)
    assert str(world.folder / "second" / "global_step_6") in world.refusal()


def test_a_named_checkpoint_is_checked_before_a_later_one_is_set_aside(world):
    whole = world.save("other", 4).parent
    world.config.trainer.resume_mode = "resume_path"
    for path in (None, world.folder / "other", world.folder / "other" / "global_step_5"):
        world.config.trainer.resume_from_path = path and str(path)
        assert f"trainer.resume_from_path={path} is not a complete checkpoint" in world.refusal()
    world.config.trainer.resume_from_path = f"{whole}/"
    choose_start(world.config)
    assert world.config.trainer.resume_from_path == str(whole)  # veRL reads the number at its end
    world.save("other", 4, devices=2)
    assert "shards for 2 devices" in world.refusal()


@pytest.mark.parametrize(
    ("mode", "path", "step"),
    [("auto", None, None), ("disable", None, 0), ("resume_path", "runs/other/global_step_12/", 12)],
)
def test_the_settings_say_at_which_step_a_run_starts(mode, path, step):
    trainer = {"resume_mode": mode, "resume_from_path": path}
    assert start_step(OmegaConf.create({"trainer": trainer})) == step
