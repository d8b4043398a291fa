"""Starting a training run again: which validation is due, and what its metrics add up to in the end."""

import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest
from made_run import DOCUMENT, conversation
from omegaconf import DictConfig, OmegaConf
from terminal import terminal_as_stdout
from verl_saves import save

from drzero.ops.errors import OutOfTime
from drzero.ops.process.child import Command
from drzero.ops.records import EVENTS_FILE
from drzero.ops.services.services import ServiceGroup
from drzero.ops.stop_time import NOTE, Note, read_note, write_note
from drzero.ops.supervisor import NothingDone
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_plain, resolve
from drzero.recipe.metrics import COLUMNS, read_metrics, spent_tokens
from drzero.runs.view.follow import following
from drzero.stages import training
from drzero.stages.examples import read_examples
from drzero.stages.result import read_result
from drzero.stages.summary import print_summary, summarise
from drzero.stages.training import Collapsed, _plan_validation, _tidy, exported, finish, prepare, train
from verl_ext.checkpoints import TRACKER
from verl_ext.method.challenger_reward import challenger_reward
from verl_ext.trainer.collapse import ALARM

TRAINED = {"training/global_step": 1, "drzero/rollout/rows": 4.0, "perf/total_num_tokens": 100}
JUDGED = TRAINED | {"drzero/collapse/alarms": 0}
ALARMED = {"drzero/collapse/alarms": 2}
VALIDATED = {"drzero/val/em": 0.5, "drzero/val/rows": 6.0, "drzero/val/failed": 1.0}


def log(folder, attempt, *lines, torn=""):
    """A start's metrics file."""
    path = folder / "metrics" / f"attempt_{attempt:03d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in lines) + torn)


@pytest.mark.parametrize(
    ("saved", "validated", "frequency", "before", "alone"),
    [
        (0, [], 2, True, False),
        (2, [0, 2], 2, False, False),
        (2, [0], 2, True, False),
        (3, [0, 2], 2, False, False),
        (6, [0, 2, 4, 6], 2, False, False),
        (6, [0, 2, 4], 2, True, True),
        (6, [], -1, False, False),
    ],
    ids=["new", "validated", "killed before it", "not due", "finished", "finished but for it", "never"],
)
def test_a_start_validates_what_the_last_one_did_not_come_to(
    tmp_path, saved, validated, frequency, before, alone
):
    if saved:
        (tmp_path / TRACKER).write_text(str(saved))
    log(tmp_path, 1, *((step, VALIDATED) for step in validated))
    trainer = {"val_before_train": frequency > 0, "test_freq": frequency}
    trainer |= {"total_training_steps": 6, "resume_mode": "auto"}
    config = OmegaConf.create({"trainer": trainer})
    _plan_validation(config, tmp_path)
    assert (config.trainer.val_before_train, config.trainer.val_only) == (before, alone)


def test_a_step_that_was_run_again_counts_as_it_went_last_and_has_cost_its_tokens_again(tmp_path):
    log(tmp_path, 1, (1, TRAINED), (2, TRAINED), torn='{"step": 3, "da')
    log(tmp_path, 2, (2, TRAINED | {"perf/total_num_tokens": 7}))
    steps = read_metrics(tmp_path)
    assert list(steps) == [1, 2] and steps[2]["perf/total_num_tokens"] == 7
    assert spent_tokens(tmp_path) == 207


def test_a_validation_at_the_start_adds_to_its_step_and_is_no_step_of_training(tmp_path):
    log(tmp_path, 1, (0, VALIDATED), (1, TRAINED), (2, TRAINED))
    log(tmp_path, 2, (2, VALIDATED | {"drzero/val/em": 1.0}))
    steps = read_metrics(tmp_path)
    assert steps[2] == TRAINED | VALIDATED | {"drzero/val/em": 1.0}
    figures = summarise(steps, "grpo")
    assert (figures["steps"], figures["rollouts"], figures["validation_failed"]) == (2, 8, 2)
    assert (figures["validation_exact_match_first"], figures["validation_exact_match_last"]) == (0.5, 1.0)


def test_figures_without_data_are_left_out_and_others_are_means_over_rows():
    failed = {"drzero/val/rows": 0.0, "drzero/val/failed": 7.0}
    figures = summarise({0: VALIDATED, 2: TRAINED | failed}, "grpo")
    assert (figures["validation_exact_match_last"], figures["validation_failed"]) == (0.5, 8)
    both, one = {f"{ALARM}zero-variance": 1.0, f"{ALARM}entropy": 1.0}, {f"{ALARM}entropy": 1.0}
    steps = {4: TRAINED, 5: JUDGED | one, 6: JUDGED, 7: JUDGED | both, 8: JUDGED | both}
    figures = {name: step for name, step in summarise(steps, "grpo").items() if name.endswith("_from_step")}
    assert figures == {"collapse_entropy_from_step": 5, "collapse_zero_variance_from_step": 7}
    won, reward = "drzero/reward/part/won", "drzero/reward/score"
    steps = {1: TRAINED | {reward: 1.0, won: 1.0}, 2: TRAINED | {reward: 0.5, "drzero/rollout/rows": 12.0}}
    figures = summarise(steps, "environment")
    assert (figures["reward"], figures["part_won"]) == (0.625, 1.0)
    one_hop = TRAINED | {"drzero/reward/score": 0.5, "drzero/rollout/rows_multi_hop": 0.0}
    figures = summarise({1: one_hop}, "hrpo")
    assert figures["reward"] == 0.5 and "searched_share_multi_hop" not in figures


def summary_of(folder, method):
    """Print the summary of the run in a folder."""
    run = {"dir": str(folder), "name": "run", "export_dir": str(folder / "export")}
    print_summary(OmegaConf.create({"run": run, "method": method}))


@pytest.mark.parametrize(
    ("steps", "alarms"),
    [({1: TRAINED}, None), ({1: TRAINED, 2: JUDGED}, 0), ({1: JUDGED | ALARMED, 2: JUDGED}, 1)],
    ids=["no whole window", "none", "one"],
)
def test_no_alarms_are_reported_for_a_run_too_short_to_judge_and_the_summary_says_so(
    tmp_path, capsys, steps, alarms
):
    assert summarise(steps, "hrpo").get("steps_with_collapse_alarms") == alarms
    log(tmp_path, 1, *steps.items())
    summary_of(tmp_path, "hrpo")
    assert ("not judged" in capsys.readouterr().out) == (alarms is None)


def dumped(question, answer, k, hop=1):
    """A line of a challenger's dump, with the reward that its question earns."""
    said = conversation(question, answer, searches=hop - 1)
    reward = asdict(challenger_reward(said, DOCUMENT, hop, k=k))
    kept = {"step": 1, "hop": hop, "doc_id": "firm", "document": DOCUMENT, "question": question}
    return kept | {"reward": reward, "trajectory": said.to_dict()}


def test_a_challengers_run_ends_with_questions_that_earned_their_difficulty_and_others_that_did_not(
    tmp_path, capsys
):
    log(tmp_path, 1, (1, TRAINED))
    lines = [
        dumped("Where has Porlom Works its seat?", "Vizmam", 2),
        dumped("What does Porlom Works make?", "paper", 5),
        dumped("Who leads Porlom Works?", "Nobody", 0),
        dumped("Is Vizmam in Vizmam?", "Vizmam", None),
        dumped("What was asked and never tried?", "paper", None),
        dumped("Who is the mayor where Porlom Works sits?", "Brurbul Lernin", 1, hop=2),
    ]
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "step_0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary_of(tmp_path, "hrpo")
    shown = read_examples(tmp_path)
    assert [one.answer for one in shown.accepted] == ["Vizmam", "Brurbul Lernin"]
    assert shown.accepted[0].reason.startswith("2 of 5 attempts gave this answer, reward ")
    assert shown.accepted[1].evidence.startswith("found: Vizmam: Vizmam is a town")
    assert [one.reason for one in shown.rejected] == [
        "5 of 5 attempts gave this answer: too easy",
        "0 of 5 attempts gave this answer: too hard, or its answer is wrong",
        "the question contains its answer",
    ]
    out = capsys.readouterr().out
    assert "Where has Porlom Works its seat? → Vizmam" in out and "too easy" in out


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("method", COLUMNS)
def test_the_summary_has_every_heading_whole_at_any_width(tmp_path, capsys, monkeypatch, method, width):
    monkeypatch.setenv("COLUMNS", str(width))
    figures = {"drzero/val/rows": 8.0} | dict.fromkeys(COLUMNS[method].values(), 0.123456)
    log(tmp_path, 1, (1, TRAINED | figures), (200, TRAINED | figures))
    summary_of(tmp_path, method)
    table = re.split(r"\n  (?=[a-z])", capsys.readouterr().out)[0].splitlines()
    assert {word for column in COLUMNS[method] for word in column.split()} <= {*" ".join(table).split()}
    assert sum(line.count("0.123") for line in table) == 2 * len(COLUMNS[method])
    assert max(map(len, table)) <= width and (len(table) == 5) == (width == 200)
    assert summarise({}, method)["steps"] == 0


@pytest.fixture(scope="module")
def composed():
    """A challenger's config; composing takes a second."""
    return compose_plain("challenger", ["hardware=cpu", "trainer.total_training_steps=50"])


@pytest.fixture
def configured(composed, tmp_path):
    """A challenger's resolved config with a folder of its own, which is there."""

    def make(*overrides):
        changes = OmegaConf.from_dotlist([f"paths.checkpoints={tmp_path}", *overrides])
        config = resolve(cast(DictConfig, OmegaConf.merge(composed, changes)))
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        return config

    return make


def test_a_partial_dump_of_a_killed_start_is_removed(configured):
    config = configured()
    folder = Path(config.run.dir)
    (folder / "dumps").mkdir()
    for name in ("step_0001.jsonl", ".step_0002.jsonl.a1b2.tmp"):
        (folder / "dumps" / name).touch()
    _tidy(config, folder)
    assert [path.name for path in (folder / "dumps").iterdir()] == ["step_0001.jsonl"]


def let_the_trainer_leave(note, folder, monkeypatch):
    """Instead of veRL a process that ends well, with no note or one of step 0 before it has begun."""
    files = {NOTE: json.dumps(asdict(note))} if note else {}
    if note and note.step:
        files["heartbeats.jsonl"] = json.dumps({"time": 0, "step": note.step, "phase": "rollout"}) + "\n"
    code = ";".join(f"open({str(folder / name)!r}, 'w').write({text!r})" for name, text in files.items())
    log = folder / "logs" / "trainer.log"
    command = Command(name="trainer", command=(sys.executable, "-c", code), log_path=log)
    monkeypatch.setattr(training, "trainer_command", lambda *_: command)


@pytest.mark.parametrize(
    ("note", "error"),
    [(Note(0, "its start took all the time there was"), OutOfTime), (None, NothingDone)],
    ids=["note", "none"],
)
def test_a_trainer_that_came_to_no_step_is_out_of_time_only_if_it_said_so(
    configured, monkeypatch, note, error
):
    config = configured()
    folder = Path(config.run.dir)
    let_the_trainer_leave(note, folder, monkeypatch)
    with ServiceGroup([]) as services, pytest.raises(error):
        training._until_done(config, folder, services)


def no_view(config):
    return nullcontext()


WHY = "collapse alarm [searching]: 0 % of the rollouts of two and more hops search"


def collapsing(configured, monkeypatch):
    """A run whose trainer will stop at a collapse after step 5; its folder."""
    config = configured("collapse.policy=stop")
    folder = Path(config.run.dir)
    save(folder, 5)
    log(folder, 1, (5, JUDGED | ALARMED | {f"{ALARM}searching": 1.0}))
    let_the_trainer_leave(Note(5, WHY, collapsed=True), folder, monkeypatch)
    return config, folder


def test_a_run_that_collapsed_ends_in_one_message_and_so_does_its_rerun_before_anything_starts(
    configured, monkeypatch, capsys
):
    config, folder = collapsing(configured, monkeypatch)
    with pytest.raises(Collapsed) as stopped:
        train(config, [], no_view)
    message = str(stopped.value)
    assert message.startswith(f"stopped at step 5 of 50, which is saved (collapse.policy=stop): {WHY}. ")
    assert "collapse.policy=warn resumes" in message and "\n" not in message
    assert re.search(r"collapse searching from step +5\n", capsys.readouterr().out)
    assert examine(folder).sentence == message
    starts = (folder / "logs" / EVENTS_FILE).read_text()
    with pytest.raises(Collapsed, match=re.escape(message)):
        train(config, [], no_view)
    assert (folder / "logs" / EVENTS_FILE).read_text() == starts


def test_a_run_whose_stdout_is_closed_is_finished_all_the_same(configured, monkeypatch):
    config = configured()
    folder = Path(config.run.dir)
    save(folder, 5)
    log(folder, 1, (5, JUDGED))
    seen, stdout = os.pipe()
    os.close(seen)
    with open(stdout, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        finish(config, {})
    assert (folder / "result.json").is_file()


@pytest.mark.parametrize("typed", [[], "wandb", ["console", "wandb"], ["tensorboard", "file"]], ids=str)
def test_metrics_go_to_a_file_whatever_other_loggers_are_named(configured, typed, monkeypatch):
    config = configured()
    config.trainer.logger = typed
    monkeypatch.setattr(training, "check_and_resolve", lambda config, stage: config)  # no world to check
    prepare(config, "challenger")
    named = [typed] if isinstance(typed, str) else typed
    assert set(config.trainer.logger) == {"file", *named} and list(config.trainer.logger).count("file") == 1


@pytest.mark.parametrize("stopped", [0, 3], ids=["in one go", "after a stop that saved"])
def test_a_run_that_was_to_save_nothing_ends_without_a_checkpoint_or_an_export(configured, capsys, stopped):
    config = configured()
    config.trainer.save_freq, config.trainer.total_training_steps = -1, 5
    folder = Path(config.run.dir)
    if stopped:
        save(folder, stopped)
    log(folder, 1, (5, JUDGED))
    finish(config, exported(config))
    assert "nothing to export" in (told := capsys.readouterr().out) and "global_step_0" not in told
    assert read_result(folder).outputs == {}


def test_the_summary_of_a_run_that_collapsed_is_below_its_live_view(configured, monkeypatch):
    config, _ = collapsing(configured, monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with terminal_as_stdout() as text:
        with pytest.raises(Collapsed):
            train(config, [], following)
        view, cursor_is_shown_again, below = text().rpartition("\x1b[?25h")
    assert "since its start" in view and cursor_is_shown_again
    assert re.search(r"collapse searching from step +5", below)


@pytest.mark.parametrize(
    ("overrides", "saved", "reported"),
    [
        (["collapse.policy=warn"], 5, True),
        (["collapse.policy=stop"], 4, False),
        (["collapse.policy=stop", "trainer.resume_mode=disable"], 5, False),
    ],
    ids=["policy changed", "an earlier checkpoint", "from the start"],
)
def test_a_collapsed_run_starts_again_where_that_was_asked_for(
    configured, monkeypatch, capsys, overrides, saved, reported
):
    config = configured(*overrides)
    folder = Path(config.run.dir)
    save(folder, saved)
    write_note(folder, Note(5, WHY, collapsed=True))
    let_the_trainer_leave(None, folder, monkeypatch)
    with pytest.raises(NothingDone):
        train(config, [], no_view)
    said = f"resuming after step 5 despite the collapse (collapse.policy=warn): {WHY}"
    assert (said in capsys.readouterr().out) == reported
    assert read_note(folder) is None
