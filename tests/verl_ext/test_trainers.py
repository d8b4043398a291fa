"""The trainers over a real TransferQueue: advantages, logs, dumps, and ends in time."""

import asyncio
import json
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl_saves import FILES, save

from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.notices import ALARM_KIND
from drzero.ops.records import EVENTS_FILE, read_json_lines
from drzero.ops.stop_time import STOP_VARIABLE, read_note
from drzero.preflight.fixed import REWARD_MANAGERS
from drzero.recipe.compose import compose_plain, resolve
from verl_ext.checkpoints import TRACKER, is_whole, saved_step, settle_checkpoints, step_folder
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.rewards import solver_score
from verl_ext.trainer.collapse import ALARM, WINDOW
from verl_ext.trainer.step_rows import read_log_probs, read_rows
from verl_ext.trainer.trainers import GRPO, GroupRelativeTrainer, TooManyFailures

HrpoSync, GrpoSync = (
    cast(type[GroupRelativeTrainer], get_trainer_cls(f"drzero_{method}_sync")) for method in ("hrpo", "grpo")
)

WHOLE = len(FILES)
FAILED = SearchCall("r", ("q",), failed=True, error="down")
# hop, reward, valid, padding: two groups of three and two, a lone row, an invalid and a padding row.
STEP = [(1, 0.0, True, False), (2, 1.5, True, False), (1, 1.0, True, False), (3, 0.7, True, False)]
STEP += [(1, 9.0, False, False), (2, 0.5, True, False), (1, 0.5, True, False), (1, 9.0, True, True)]
LENGTHS = [3, 1, 2, 4, 2, 3, 1, 2]
# Accepted answers by hop; a challenger's prompt has none.
TARGETS = {1: ["Oslo", "Christiania"], 2: None, 3: []}
# The rows' prompts, for GRPO: the same groups as by hop but for row 5, which answers the first prompt.
PROMPTS = ["a", "b", "a", "c", "a", "a", "a", "a"]


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def put_step(partition):
    """STEP as the rollout leaves it: the reward on the last token, tool tokens masked out."""
    masks = [torch.tensor([1] * (length - 1) + [1]) for length in LENGTHS]
    masks[3][1] = 0
    scores = [torch.zeros(length) for length in LENGTHS]
    for row, (_, reward, _, _) in zip(scores, STEP, strict=True):
        row[-1] = reward
    rewards = [
        {"score": reward, "valid": valid, "reason_invalid": None if valid else "down"}
        for _, reward, valid, _ in STEP
    ]
    trajectories = [Trajectory((Turn("t", () if valid else (FAILED,)),)) for _, _, valid, _ in STEP]
    extra_fields = [
        {"trajectory": played.to_dict(), "token_drift": 0, "reward_extra_info": reward}
        for played, reward in zip(trajectories, rewards, strict=True)
    ]
    fields = {
        "response_mask": nested(masks),
        "rm_scores": nested(scores),
        "rollout_log_probs": nested([-torch.arange(1.0, length + 1) for length in LENGTHS]),
        "data_source": NonTensorStack(*[f"search_zero_{hop}" for hop, *_ in STEP]),
        "extra_info": NonTensorStack(*[{"hop": hop, "doc_id": f"d{i}"} for i, (hop, *_) in enumerate(STEP)]),
        "extra_fields": NonTensorStack(*extra_fields),
        "reward_model": NonTensorStack(*[{"ground_truth": {"target": TARGETS[hop]}} for hop, *_ in STEP]),
    }
    keys = [f"{partition}{prompt}_{index}_0" for index, prompt in enumerate(PROMPTS)]
    tags = [{"is_padding": padding} for *_, padding in STEP]
    tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=TensorDict(fields, batch_size=len(STEP)), tags=tags
    )
    return KVBatchMeta(keys=keys, tags=tags, partition_id=partition)


def trainer(batch_size=8, limit=0.25, kind=HrpoSync):
    """A trainer that has not been set up: its hooks need the config alone."""
    made = kind.__new__(kind)
    config = {"data": {"train_batch_size": batch_size}, "actor_rollout_ref": {"rollout": {"n": 1}}}
    config |= {"run": {"max_failed_share": limit}, "trainer": {"rollout_data_dir": None}}
    made.config = OmegaConf.create(config)
    made.global_steps, made.parameter_sync_step = 3, 1
    made._heartbeat, made._flow = Mock(), Mock()
    return made


def write_advantages(partition, kind, *, balance_hops=False):
    """The columns that a trainer writes for STEP, and its metrics under `metrics`."""
    batch, metrics, made = put_step(partition), {}, trainer(kind=kind)
    made.config.balance_hops = balance_hops
    made._compute_advantage(batch, metrics)
    names = ["advantages", "returns", "response_mask", "loss_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=partition, select_fields=names)
    return {name: list(data[name].unbind()) for name in names} | {"metrics": [metrics]}


def by_hand(row):
    """(r - mean of the hop) / sqrt(population variance of the hop + 1e-6), over rows that count."""
    hop, reward, valid, padding = STEP[row]
    if padding or not valid:
        return 0.0
    group = [r for h, r, counts, pads in STEP if h == hop and counts and not pads]
    mean = sum(group) / len(group)
    return (reward - mean) / (sum((r - mean) ** 2 for r in group) / len(group) + 1e-6) ** 0.5


def test_hrpo_compares_rows_of_one_hop_count(queue):
    written = write_advantages("advantages", HrpoSync)
    for row, length in enumerate(LENGTHS):
        own = torch.full((length,), by_hand(row)) * written["loss_mask"][row]
        assert torch.allclose(written["advantages"][row], own, atol=1e-5)
        assert torch.equal(written["advantages"][row], written["returns"][row])
    for row in (4, 7):  # invalid, and padding
        assert written["loss_mask"][row].sum() == written["response_mask"][row].sum() == 0
    for row in (0, 1, 2, 5, 6):
        assert written["loss_mask"][row].tolist() == [1] * LENGTHS[row]
    # A lone row has no advantage, keeps its place in the loss, and masks out the tool's token.
    assert written["loss_mask"][3].tolist() == [1, 0, 1, 1] and by_hand(3) == 0
    (metrics,) = written["metrics"]
    assert metrics["drzero/hrpo/lone_groups"] == 1
    counted = [abs(by_hand(row)) for row in (0, 1, 2, 3, 5, 6)]
    assert metrics["drzero/hrpo/advantage_abs_mean"] == pytest.approx(sum(counted) / 6, abs=1e-5)


def test_grpo_compares_answers_to_one_prompt(queue):
    # Rows 0, 2, 5 and 6 answer prompt a and count: rewards 0, 1, 0.5, 0.5, sample deviation sqrt(1/6).
    written = write_advantages("grpo", GrpoSync)
    deviation = (1 / 6) ** 0.5 + 1e-6
    expected = {0: -0.5 / deviation, 2: 0.5 / deviation}
    for row in range(len(STEP)):
        own = written["loss_mask"][row] * expected.get(row, 0.0)
        assert torch.allclose(written["advantages"][row], own, atol=1e-5)
    for row in (4, 7):
        assert written["loss_mask"][row].sum() == written["response_mask"][row].sum() == 0
    assert written["metrics"][0]["drzero/grpo/lone_groups"] == 2


def test_a_step_with_many_failures_is_stopped_with_its_causes(queue):
    causes = r"3 raised in the agent loop .*, 1 are invalid, the first because: \['down'\]"
    with pytest.raises(TooManyFailures, match=rf"^step 3: 40% of 10 rollouts .*{causes}"):
        trainer(batch_size=10)._compute_advantage(put_step("many"), {})


def test_a_step_without_a_row_that_counts_is_stopped(queue, monkeypatch):
    monkeypatch.setattr("test_trainers.STEP", [(1, 9.0, False, False)] * 8)
    with pytest.raises(TooManyFailures, match="step 3: no rollout is left to learn from"):
        trainer(limit=1.0)._compute_advantage(put_step("none"), {})


def test_hop_counts_can_share_an_update_equally(queue, monkeypatch):
    # One question of one hop, two of two hops.
    hops, rewards = (1, 2, 1, 2, 2, 2, 2, 1), (0, 0, 1, 1, 0, 1, 1, 1)
    step = [(hop, float(reward), True, False) for hop, reward in zip(hops, rewards, strict=True)]
    monkeypatch.setattr("test_trainers.STEP", step)
    monkeypatch.setattr("test_trainers.PROMPTS", list("ababccca"))
    written = write_advantages("balanced", GrpoSync, balance_hops=True)
    sizes = [float(row[0].abs()) for row in written["advantages"]]
    one, two = (sum(size for size, hop in zip(sizes, hops, strict=True) if hop == own) for own in (1, 2))
    assert one == pytest.approx(two, rel=1e-4)
    assert one > 0


def test_log_probs_leave_out_tool_tokens_and_rows_that_do_not_count(queue):
    batch = put_step("log-probs")
    read = read_log_probs(batch, read_rows(batch))
    assert read[3] == [-1.0, -3.0, -4.0]  # the second token is the tool's
    assert read[4] == read[7] == []
    assert [len(values) for values in read] == [3, 1, 2, 3, 0, 3, 1, 0]


def test_a_dump_has_every_real_row_and_is_announced_under_its_final_name(queue, tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "artefacts.jsonl"))
    stepped, folder = trainer(), tmp_path / "dumps"
    stepped.config.trainer.rollout_data_dir = str(folder)
    stepped._compute_advantage(put_step("dump"), {})
    assert [path.name for path in folder.iterdir()] == announced(tmp_path) == ["step_0003.jsonl"]
    lines = [json.loads(line) for line in (folder / "step_0003.jsonl").read_text().splitlines()]
    assert sorted(line["doc_id"] for line in lines) == [f"d{row}" for row in range(7)]
    assert all(line["targets"] == (TARGETS[line["hop"]] or []) for line in lines)


VALIDATED = {"reward": [1.0, 0.0, 0.0], "score": [1.0, 0.0, 0.0], "f1": [1.0, 0.5, 0.0], "hop": [1, 2, 2]}
VALIDATED |= {"valid": [True, True, False], "reason_invalid": [None, None, "down"]}
VALIDATED |= {"answer": ["Vell", None, "x"]}


def validate(infos, expected=4, limit=0.5):
    """A validation of three rows, with one rollout lost on the way."""
    uids = [f"u{row}" for row in range(len(infos.get("valid", [])))]
    counts = {("search_zero", f"u{row}"): 1 for row in range(expected)}
    return trainer(kind=GrpoSync, limit=limit)._val_metrics_update(
        ["search_zero"] * len(uids), uids, infos, [2] * 3, counts
    )


def test_validation_counts_spoiled_rows_apart():
    metrics = validate(VALIDATED)
    assert metrics["drzero/val/em"] == metrics["val-core/search_zero/reward/mean@1"] == 0.5
    assert (metrics["drzero/val/f1"], metrics["val-aux/search_zero/f1/mean@1"]) == (0.75, 0.75)
    assert (metrics["drzero/val/rows"], metrics["drzero/val/failed"]) == (2, 2)
    assert (metrics["drzero/val/em_hop_1"], metrics["drzero/val/em_hop_2"]) == (1.0, 0.0)


def test_a_validation_with_many_failures_is_stopped_with_its_causes():
    causes = r"1 raised in the agent loop .*, 1 are invalid, the first because: \['down'\]"
    with pytest.raises(TooManyFailures, match=rf"^validation after step 3: 50% of 4 rollouts .*{causes}"):
        validate(VALIDATED, limit=0.25)


def test_a_validation_without_valid_rows_has_no_score():
    metrics = validate(VALIDATED | {"valid": [False] * 3}, limit=1.0)
    assert metrics == {"drzero/val/rows": 0, "drzero/val/failed": 4}


@pytest.mark.parametrize("kind", [HrpoSync, GrpoSync])
def test_kl_in_the_reward_is_refused(kind):
    with pytest.raises(ValueError, match="use_kl_in_reward=false"):
        kind(OmegaConf.create({"algorithm": {"use_kl_in_reward": True}}))


class Rehearsed(PPOTrainerSync):
    """A run of `fit` without models: steps take no time, and workers save small files."""

    def begin(self, saved, steps, at, files):
        """Set up as `init` would. `at` has calls by step, `files` the number of files that a save writes."""
        self.global_steps, self.total_training_steps, self.steps_per_epoch = saved, steps, 100
        self.at, self.files = at, files
        self.validated = []
        self.actor_rollout_wg = self.train_dataloader = self.checkpoint_manager = self
        self._init_dump_executor()

    def step(self, metrics, timing_raw):
        self.at.get(self.global_steps, lambda: None)()
        return put_step(f"fit{self.global_steps}")

    def _validate(self):
        self.validated.append(self.global_steps)
        return {"drzero/val/em": 0.5}

    def _compute_metrics(self, *arguments, **named):
        """Nothing, because no worker has computed anything."""

    def save_checkpoint(self, folder, *arguments, **named):
        actors = len(FILES) - 1
        save(Path(self.config.trainer.default_local_dir), self.global_steps, min(self.files, actors))
        if self.files < actors:
            raise OSError("the disk is gone")

    def state_dict(self):
        if self.files < len(FILES):
            raise OSError("the disk is gone")
        return {}

    def update_weights(self, step):
        pass


class Timed(GroupRelativeTrainer, Rehearsed):
    """The trainer under test around that run."""

    base_mode = "sync"
    method = replace(GRPO, metrics=lambda rows: {})


@pytest.fixture(scope="module")
def composed():
    overrides = ["hardware=cpu", "trainer.logger=[file]", "trainer.val_before_train=false"]
    return resolve(compose_plain("solver", overrides))


@pytest.fixture
def rehearse(queue, composed, tmp_path, monkeypatch):
    monkeypatch.delenv(STOP_VARIABLE, raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "artefacts.jsonl"))

    def stop_in(seconds):
        monkeypatch.setenv(STOP_VARIABLE, str(time.time() + seconds))

    def run(*overrides, steps=3, saved=0, stop=(-1, 0), files=WHOLE):
        """`stop`: in which step (0: before the first) a stop time so many seconds ahead is set."""
        places = [f"run.dir={tmp_path}", f"trainer.default_local_dir={tmp_path}"]
        changes = OmegaConf.from_dotlist([*places, *overrides])
        made = Timed(cast(DictConfig, OmegaConf.merge(composed, changes)))
        if stop[0] == 0:
            stop_in(stop[1])
        made.begin(saved, steps, {stop[0]: lambda: stop_in(stop[1])}, files)
        made.fit(None)
        log = tmp_path / "metrics.jsonl"
        return made, [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []

    return run


def phases(folder):
    lines = (folder / "heartbeats.jsonl").read_text().splitlines()
    return [(beat["step"], beat["phase"]) for beat in map(json.loads, lines)]


@pytest.mark.parametrize("freq", [1, 2, 10, -1])
def test_a_run_out_of_time_saves_and_logs_a_last_step(rehearse, tmp_path, freq):
    _, logged = rehearse(f"trainer.save_freq={freq}", "trainer.test_freq=-1", stop=(2, 20))
    assert [line["step"] for line in logged] == [1, 2]
    assert saved_step(tmp_path) == 2 and is_whole(step_folder(tmp_path, 2))
    note = read_note(tmp_path)
    assert note and note.step == 2 and STOP_VARIABLE in note.why
    end = [(2, "save"), (2, "weight-sync"), (2, "out-of-time"), (2, "done")]
    # One save and no more, whether it was due or not.
    assert phases(tmp_path)[-4:] == end and phases(tmp_path).count((2, "save")) == 1
    last = [event["text"] for event in read_json_lines(tmp_path / "logs" / EVENTS_FILE)][-1]
    assert last == f"checkpoint of step 2: {step_folder(tmp_path, 2)}"


@pytest.mark.parametrize("stop", [(1, 3600), (3, -5)], ids=["enough time", "in its last step"])
def test_a_run_that_is_not_out_of_time_ends_normally(rehearse, tmp_path, stop):
    trainer, logged = rehearse("trainer.test_freq=3", stop=stop)
    assert [line["step"] for line in logged] == [1, 2, 3]
    assert saved_step(tmp_path) == 3 and trainer.validated[-1] == 3
    assert read_note(tmp_path) is None and phases(tmp_path)[-1] == (3, "done")


def test_a_late_validation_is_left_to_the_next_start(rehearse, tmp_path):
    trainer, logged = rehearse("trainer.test_freq=1", "trainer.val_before_train=true", stop=(2, 20))
    assert trainer.validated == [0, 1]
    assert ["drzero/val/em" in line["data"] for line in logged] == [True, True, False]
    assert (2, "validation") not in phases(tmp_path)


@pytest.mark.parametrize("saved", [0, 2])
def test_no_step_begins_after_the_stop_time(rehearse, tmp_path, saved):
    rehearse(saved=saved, stop=(0, -1))
    assert phases(tmp_path) == [(0, "start-up"), (saved, "out-of-time"), (saved, "done")]
    assert not list(tmp_path.glob("global_step_*"))
    note = read_note(tmp_path)
    assert note and note.step == saved and note.why.endswith("when the first step was to begin")


def test_the_first_step_runs_however_little_time_is_left(rehearse, tmp_path):
    _, logged = rehearse("trainer.save_freq=10", stop=(0, 100))
    assert [line["step"] for line in logged] == [1] and saved_step(tmp_path) == 1


@pytest.mark.parametrize("freq", [1, 10])
def test_a_collapsed_run_saves_its_last_step(rehearse, tmp_path, freq):
    overrides = (f"trainer.save_freq={freq}", "trainer.test_freq=5", "collapse.policy=stop")
    trainer, logged = rehearse(*overrides, steps=3 * WINDOW)  # no rollout of its steps searches
    assert [line["step"] for line in logged] == list(range(1, WINDOW + 1)) == [1, 2, 3, 4, 5]
    assert saved_step(tmp_path) == WINDOW and is_whole(step_folder(tmp_path, WINDOW))
    assert phases(tmp_path).count((WINDOW, "save")) == 1 and trainer.validated == [WINDOW]
    note = read_note(tmp_path)
    assert note and note.collapsed and note.step == WINDOW
    assert note.why.startswith("collapse alarm [searching]: 0 % of the rollouts of two and more hops search")
    events = read_json_lines(tmp_path / "logs" / EVENTS_FILE)
    alarms = [(event["name"], event["step"]) for event in events if event["kind"] == ALARM_KIND]
    assert alarms == [("searching", WINDOW)]
    assert logged[-1]["data"] | {"drzero/collapse/alarms": 1, f"{ALARM}searching": 1} == logged[-1]["data"]
    assert not any(name.startswith(ALARM) for line in logged[:-1] for name in line["data"])


@pytest.mark.parametrize(("policy", "steps"), [("warn", WINDOW + 1), ("stop", WINDOW)])
def test_a_collapse_only_warns_or_comes_too_late_to_stop(rehearse, tmp_path, policy, steps):
    _, logged = rehearse(f"collapse.policy={policy}", steps=steps)
    assert logged[-1]["step"] == steps and f"{ALARM}searching" in logged[-1]["data"]
    assert read_note(tmp_path) is None


def answered(group, step, *turns):
    """Add a question's finished and scored answers to the queue."""
    answers = [Trajectory((turn,)).to_dict() for turn in turns]
    scored = [
        {"reward_extra_info": asyncio.run(solver_score("nq", "", {"target": ["Vell"]}, {"trajectory": one}))}
        for one in answers
    ]
    keys = [f"{group}_{number}_0" for number in range(len(turns))]
    fields = TensorDict({"extra_fields": NonTensorStack(*scored)}, batch_size=len(turns))
    tags = [{"status": "success", "global_steps": step}] * len(turns)
    tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
    finished = {"is_prompt": True, "status": "finished", "global_steps": step}
    tq.kv_put(key=group, partition_id="train", tag=finished)


def test_groups_with_equal_scores_are_replaced_but_not_spoiled_ones(queue, composed, tmp_path):
    chosen = [f"run.dir={tmp_path}", "algorithm.filter_groups.enable=true", "data.train_batch_size=3"]
    config = cast(DictConfig, OmegaConf.merge(composed, OmegaConf.from_dotlist(chosen)))
    buffer = Timed(config).replay_buffer
    right, wrong, lost = Turn("<answer>Vell</answer>"), Turn("<answer>no</answer>"), Turn("c", (FAILED,))
    answered("solved", 1, right, right)
    answered("unsolved", 1, wrong, wrong)
    answered("some", 1, right, wrong)
    answered("lost", 1, lost, lost)
    asked = []

    def refill(count):
        for _ in range(count):
            asked.append(f"fresh{len(asked)}")
            answered(asked[-1], 2, wrong, right)

    buffer._buffer.refill_fn = refill
    batch, metrics = buffer.sample(global_steps=2, partition_id="train", batch_size=3)
    kept = {key.split("_")[0] for key in batch.keys}
    assert {"some", "lost"} < kept < {"some", "lost", *asked} and len(batch.keys) == 6
    assert metrics["training/filter_groups/evicted_samples"] == 2
    flow = buffer._counters.record(time.time())
    assert flow["samples"]["filtered"] > 0 and flow["points"]["buffer"]["dropped"] == 0
    tq.kv_clear(keys=list((tq.kv_list() or {}).get("train", {})), partition_id="train")


@pytest.mark.parametrize("key", ["a" * 40, ""])
def test_with_a_key_trajectories_go_to_wandb_as_a_table(rehearse, tmp_path, monkeypatch, key):
    for name, value in {"DIR": str(tmp_path), "MODE": "offline", "API_KEY": key, "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    rehearse("trainer.logger=[file,wandb]", steps=2)
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    rows = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    real = [(score, valid, "t") for _, score, valid, padding in STEP if not padding]
    assert sorted(row["step"] for row in rows) == ([1] * len(real) + [2] * len(real) if key else [])
    for step in {row["step"] for row in rows}:
        shown = [(r["score"], r["counts"], r["conversation"]) for r in rows if r["step"] == step]
        assert sorted(shown) == sorted(real)


def announced(folder):
    log = folder / "artefacts.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    return [Path(json.loads(line)["path"]).name for line in lines]


def test_every_saved_step_is_announced_once(rehearse, tmp_path):
    rehearse("trainer.save_freq=2", steps=5)
    assert announced(tmp_path) == ["global_step_2", "global_step_4", "global_step_5"]


@pytest.mark.parametrize("files", range(len(FILES) + 1))
def test_a_save_that_breaks_off_is_not_announced(rehearse, tmp_path, files):
    (tmp_path / TRACKER).mkdir()  # the step's number cannot be written either
    with pytest.raises(OSError, match=f"the disk is gone|{TRACKER}"):
        rehearse("trainer.save_freq=1", files=files)
    settle_checkpoints(tmp_path)
    # The next start finds whole checkpoints only.
    whole = files == len(FILES)
    assert announced(tmp_path) == [] and saved_step(tmp_path) == int(whole)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"] * whole


def test_preflight_knows_the_reward_managers_of_this_verl():
    import_module("verl.experimental.reward_loop.reward_manager")  # registers them
    assert set(REWARD_MANAGERS) == set(REWARD_MANAGER)
