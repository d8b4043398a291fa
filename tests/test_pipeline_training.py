"""Starting a training run again: which validation is due, and what its metrics add up to in the end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ops.errors import OutOfTime
from ops.process.child import Command
from ops.services.services import ServiceGroup
from ops.supervisor import NothingDone
from pipeline.compose import compose_stage, resolve
from pipeline.metrics import read_metrics, spent_tokens
from pipeline.stages import training
from pipeline.stages.summary import COLUMNS, print_summary, summarise
from pipeline.stages.training import _plan_validation, _tidy
from verl_ext.checkpoints import TRACKER
from verl_ext.stop_time import NOTE

TRAINED = {"training/global_step": 1, "drzero/rollout/rows": 4.0, "perf/total_num_tokens": 100}
JUDGED = TRAINED | {"drzero/collapse/alarms": 0}
ALARMED = {"drzero/collapse/alarms": 2}
VALIDATED = {"drzero/val/em": 0.5, "drzero/val/rows": 6.0, "drzero/val/failed": 1.0}


def log(folder: Path, attempt: int, *lines: tuple[int, dict[str, Any]], torn: str = "") -> None:
    """A start's metrics file."""
    path = folder / "metrics" / f"attempt_{attempt:03d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in lines) + torn)


@pytest.mark.parametrize(
    ("saved", "validated", "before", "alone"),
    [
        (0, [], True, False),
        (2, [0, 2], False, False),
        (2, [0], True, False),
        (3, [0, 2], False, False),
        (6, [0, 2, 4, 6], False, False),
        (6, [0, 2, 4], True, True),
    ],
    ids=["new", "validated", "killed before it", "not due", "finished", "finished but for it"],
)
def test_a_start_validates_what_the_last_one_did_not_come_to(
    tmp_path: Path, saved: int, validated: list[int], before: bool, alone: bool
) -> None:
    if saved:
        (tmp_path / TRACKER).write_text(str(saved))
    log(tmp_path, 1, *((step, VALIDATED) for step in validated))
    trainer = {"val_before_train": True, "test_freq": 2, "total_training_steps": 6, "resume_mode": "auto"}
    config = OmegaConf.create({"trainer": trainer})
    _plan_validation(config, tmp_path)
    assert (config.trainer.val_before_train, config.trainer.val_only) == (before, alone)


def test_a_run_without_validation_gets_none(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("6")
    trainer = {"val_before_train": False, "test_freq": -1, "total_training_steps": 6, "resume_mode": "auto"}
    config = OmegaConf.create({"trainer": trainer})
    _plan_validation(config, tmp_path)
    assert (config.trainer.val_before_train, config.trainer.val_only) == (False, False)


def test_a_step_that_was_run_again_counts_as_it_went_last(tmp_path: Path) -> None:
    log(tmp_path, 1, (1, TRAINED), (2, TRAINED), torn='{"step": 3, "da')
    log(tmp_path, 2, (2, TRAINED | {"perf/total_num_tokens": 7}))
    steps = read_metrics(tmp_path)
    assert list(steps) == [1, 2] and steps[2]["perf/total_num_tokens"] == 7


def test_a_step_that_was_run_again_has_cost_its_tokens_again(tmp_path: Path) -> None:
    log(tmp_path, 1, (1, TRAINED), (2, TRAINED))
    log(tmp_path, 2, (2, TRAINED | {"perf/total_num_tokens": 7}))
    assert spent_tokens(tmp_path) == 207


def test_a_validation_at_the_start_adds_to_its_step_and_is_no_step_of_training(tmp_path: Path) -> None:
    log(tmp_path, 1, (0, VALIDATED), (1, TRAINED), (2, TRAINED))
    log(tmp_path, 2, (2, VALIDATED | {"drzero/val/em": 1.0}))
    steps = read_metrics(tmp_path)
    assert steps[2] == TRAINED | VALIDATED | {"drzero/val/em": 1.0}
    figures = summarise(steps, "grpo")
    assert (figures["steps"], figures["rollouts"], figures["validation_failed"]) == (2, 8, 2)
    assert (figures["validation_exact_match_first"], figures["validation_exact_match_last"]) == (0.5, 1.0)


def test_a_validation_that_failed_as_a_whole_is_counted_and_is_no_score() -> None:
    failed = {"drzero/val/rows": 0.0, "drzero/val/failed": 7.0}
    figures = summarise({0: VALIDATED, 2: TRAINED | failed}, "grpo")
    assert (figures["validation_exact_match_last"], figures["validation_failed"]) == (0.5, 8)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [({1: TRAINED}, None), ({1: TRAINED, 2: JUDGED}, 0), ({1: JUDGED | ALARMED, 2: JUDGED}, 1)],
    ids=["no whole window", "none", "one"],
)
def test_no_alarms_are_reported_for_a_run_too_short_to_judge(
    steps: dict[int, dict[str, Any]], expected: int | None
) -> None:
    assert summarise(steps, "hrpo").get("steps_with_collapse_alarms") == expected


@pytest.mark.parametrize(("step", "reported"), [(TRAINED, True), (JUDGED, False)], ids=["short", "judged"])
def test_the_summary_says_where_alarms_were_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: dict[str, Any], reported: bool
) -> None:
    log(tmp_path, 1, (1, step))
    run = {"dir": str(tmp_path), "name": "short", "export_dir": str(tmp_path / "export")}
    print_summary(OmegaConf.create({"run": run, "method": "hrpo"}))
    assert ("not judged" in capsys.readouterr().out) == reported


@pytest.mark.parametrize("method", COLUMNS)
def test_a_run_without_steps_has_figures_all_the_same(method: str) -> None:
    assert summarise({}, method)["steps"] == 0


def test_a_partial_dump_of_a_killed_start_is_removed(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    for name in ("step_0001.jsonl", "step_0002.partial"):
        (tmp_path / "dumps" / name).touch()
    _tidy(tmp_path, None)
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step_0001.jsonl"]


@pytest.mark.parametrize(("note", "error"), [(True, OutOfTime), (False, NothingDone)])
def test_a_trainer_that_came_to_no_step_is_out_of_time_only_if_it_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: bool, error: type[Exception]
) -> None:
    config = resolve(compose_stage("challenger", ["hardware=cpu", f"paths.checkpoints={tmp_path}"]))
    folder = Path(config.run.dir)
    folder.mkdir(parents=True)
    text = json.dumps({"step": 0, "why": "its start took all the time there was"})
    code = f"open({str(folder / NOTE)!r}, 'w').write({text!r})" if note else ""
    # Instead of veRL a process that ends well before it has begun.
    command = Command(
        name="trainer", command=(sys.executable, "-c", code), log_path=folder / "logs" / "trainer.log"
    )
    monkeypatch.setattr(training, "_trainer", lambda *_: command)
    with ServiceGroup([]) as services, pytest.raises(error):
        training._until_done(config, folder, services)
