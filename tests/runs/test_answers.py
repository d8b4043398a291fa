"""What a training run's page answers first, from made runs whose answers are known."""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import pytest
from made_run import (
    STARTED,
    added_up,
    challenger_row,
    challenger_run,
    conversation,
    event,
    lines,
    played,
    solver_row,
    tally_of,
)

from drzero.ops.process.lock import HeldLock
from drzero.ops.records import append_json_lines
from drzero.runs.report.answers import asked, next_step, troubles
from drzero.runs.report.checklist import component_states, training_checks
from drzero.runs.report.machine import machine_of
from drzero.runs.report.table import TrajectoryTable
from drzero.runs.report.text import LONGEST
from drzero.runs.report.verdict import verdict
from drzero.runs.report.write import write_report
from drzero.runs.run_folder import RunFolder

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e <!-- {{7*7}} [bold]x"


def judged(folder):
    return verdict(RunFolder(folder), tally_of(folder))


@pytest.mark.parametrize(
    ("rewards", "answer", "sentence"),
    [
        ([], "nothing yet", "No step has a trajectory that counts."),
        ([0.1], "too few to say", "reward .10 → .10 over 1 step"),
        ([0.1, 0.5, 0.9], "too few to say", "reward .10 → .90 over 3 steps"),
        ([0.1, 0.3, 0.5, 0.9], "too few to say", "reward .10 → .90 over 4 steps"),
        ([0.1, 0.2, 0.3, 0.5, 0.9], "yes", "reward .10 → .90 over 5 steps, p = .017"),
        ([0.9, 0.5, 0.3, 0.2, 0.1], "no, it got worse", "reward .90 → .10 over 5 steps, p = .017"),
        ([0.1, 0.5, 0.3, 0.2, 0.9], "not beyond noise", "reward .10 → .90 over 5 steps, p = .48"),
        ([0.5] * 9, "not beyond noise", "reward .50 → .50 over 9 steps, p = 1"),
        ([n / 40 for n in range(40)], "yes", "reward .11 → .86 over 40 steps, p < .001"),
    ],
)
def test_a_trend_is_claimed_only_if_the_order_of_the_steps_carries_it(tmp_path, rewards, answer, sentence):
    steps = [played(step, reward, reward={"integrity": True}) for step, reward in enumerate(rewards, 1)]
    found = verdict(RunFolder(challenger_run(tmp_path / "run")), added_up(steps))
    assert (found.answer, found.sentence) == (answer, sentence)


def solver_run(folder: Path, validations) -> Path:
    """A solver's run of one step that validated before and after: exact match of two hops, and its rows."""
    challenger_run(folder, steps=1, rows=1)
    config = (folder / "resolved.yaml").read_text().replace("hrpo", "grpo") + "iteration: 1\n"
    (folder / "resolved.yaml").write_text(config)
    steps = [
        {"drzero/val/em": em, "drzero/val/rows": rows, "drzero/val/failed": 0} for em, rows in validations
    ]
    metrics = [{"step": step, "data": data} for step, data in enumerate(steps)]
    lines(folder / "metrics" / "attempt_001.jsonl", metrics)
    lines(folder / "dumps" / "step_0001.jsonl", [solver_row(1, conversation("", "Brurbul Lernin"))])
    return folder


@pytest.mark.parametrize(
    ("before", "after", "n", "answer"),
    [
        (0.5, 1.0, 4, "too few to say"),
        (0.5, 0.5, 100, "not beyond noise"),
        (0.2, 0.5, 100, "yes"),
        (0.5, 0.2, 100, "no, it got worse"),
    ],
)
def test_a_validation_is_judged_by_its_questions(tmp_path, before, after, n, answer):
    found = judged(solver_run(tmp_path / "run", [(before, n), (after, n)]))
    assert found.answer == answer
    assert re.match(rf"exact match \S+ → \S+ on {n} validation questions", found.sentence)


def evaluation(folder: Path, right: dict[str, int], at: float) -> None:
    """A finished evaluation of a hundred questions a benchmark, of which the first are right."""
    (folder / "logs").mkdir(parents=True)
    lines(folder / "logs" / "events.jsonl", [event(at, "start", "retrieval", "starting")])
    (folder / "report.json").write_text(json.dumps({"benchmarks": {name: {} for name in right}}))
    (folder / "result.json").write_text("{}")
    answers = [
        {"key": f"{name}/{number}", "benchmark": name, "right": number < count}
        for name, count in right.items()
        for number in range(100)
    ]
    lines(folder / "answers.jsonl", [{"identity": {}}, *answers])


def test_the_evaluations_before_and_after_a_solver_count_most(tmp_path):
    run = solver_run(tmp_path / "solver_iter1", [(0.5, 6), (0.5, 6)])
    evaluation(tmp_path / "evaluate_iter0", {"demo_1hop": 91, "demo_2hop": 19}, -900)
    evaluation(tmp_path / "evaluate_iter1", {"demo_1hop": 90, "demo_2hop": 44}, 900)
    found = judged(run)
    assert found.answer == "yes" and found.good
    assert found.sentence == "two hops .19 → .44 on 100 held-out questions, p < .001"
    assert "one hop .91 → .90 on 100 held-out questions, p = 1" in found.more


def test_a_loss_on_one_benchmark_is_told_next_to_a_gain_on_another(tmp_path):
    run = solver_run(tmp_path / "solver_iter1", [])
    evaluation(tmp_path / "evaluate_iter0", {"demo_1hop": 91, "demo_2hop": 19}, -900)
    evaluation(tmp_path / "evaluate_iter1", {"demo_1hop": 60, "demo_2hop": 44}, 900)
    found = judged(run)
    assert found.answer == "in part"
    assert "one hop .91 → .60" in found.sentence and "two hops" in found.sentence


def test_an_evaluation_of_an_earlier_solver_of_that_name_does_not_count(tmp_path):
    run = solver_run(tmp_path / "solver_iter1", [(0.2, 100), (0.5, 100)])
    evaluation(tmp_path / "evaluate_iter0", {"demo_2hop": 19}, -900)
    evaluation(tmp_path / "evaluate_iter1", {"demo_2hop": 44}, -800)
    assert "validation" in judged(run).sentence


def wrongs(folder):
    run = RunFolder(folder)
    return troubles(run, training_checks(run, tally_of(folder)), component_states(run))


def test_an_alarm_is_told_once_with_what_to_do(tmp_path):
    folder = challenger_run(tmp_path / "run")
    (alarm,) = wrongs(folder)
    assert alarm.grave and "collapse alarm [entropy]" in alarm.what
    assert alarm.advice == "the policy hardly explores any more"
    said = "step 3: collapse alarm [entropy]: 0.020 (limit 0.05): go back"
    append_json_lines(folder / "logs" / "events.jsonl", event(380, "alarm", "trainer", said, step=3))
    (alarm,) = wrongs(folder)
    assert "(and 1 times before)" in alarm.what
    assert alarm.advice in ("go back", "the policy hardly explores any more")


def test_a_failed_run_says_why_and_the_command_that_resumes_it(tmp_path):
    folder = challenger_run(tmp_path / "run")
    crash = event(90, "crash", "retrieval", "died: killed by SIGKILL")
    lines(folder / "logs" / "events.jsonl", [event(0, "start", "retrieval", "starting"), crash])
    first = wrongs(folder)[0]
    assert first.grave and "retrieval died: killed by SIGKILL" in first.what and first.advice
    following = next_step(RunFolder(folder), judged(folder))
    assert following.command == "drzero challenger run.name=demo"


def test_a_run_in_progress_says_how_to_follow_it(tmp_path):
    folder = challenger_run(tmp_path / "run")
    with HeldLock(folder / "lock"):
        assert next_step(RunFolder(folder), judged(folder)).command == f"drzero top {folder}"


@pytest.mark.parametrize(
    ("command", "method", "steps", "following"),
    [
        ("demo trainer.total_training_steps=3", "hrpo", 3, "drzero demo trainer.total_training_steps=20"),
        ("demo paths.corpus=/c run.name=x", "hrpo", 6, "drzero evolve loop=demo paths.corpus=/c"),
        ("challenger iteration=2 model=a data.seed=3", "hrpo", 6, "drzero synthesize iteration=2 model=a"),
        ("solver iteration=2 trainer.save_freq=1", "grpo", 6, "drzero merge iteration=2"),
    ],
)
def test_the_next_command_takes_the_overrides_that_it_shares(tmp_path, command, method, steps, following):
    folder = challenger_run(tmp_path / "run", steps=steps)
    (folder / "resolved.yaml").write_text(f"# command: drzero {command}\nmethod: {method}\n")
    assert next_step(RunFolder(folder), judged(folder)).command == following


def test_a_stage_of_a_loop_goes_on_with_the_loop(tmp_path):
    folder = challenger_run(tmp_path / "challenger_iter1")
    loop, command = tmp_path / "evolve", "drzero evolve loop=demo paths.checkpoints=/c"
    loop.mkdir()
    (loop / "resolved.yaml").write_text(f"# command: {command}\n")
    for state, following in (("pending", command), ("complete", "drzero ask paths.checkpoints=/c")):
        stages = {"challenger_iter1": {"state": "complete"}, "solver_iter1": {"state": state}}
        (loop / "manifest.json").write_text(json.dumps({"stages": stages}))
        found = next_step(RunFolder(folder), judged(folder))
        assert (found.command, found.page) == (following, "../evolve/report.html")


GPUS = {
    "H100": {"name": "NVIDIA H100 80GB HBM3", "used_mb": 1, "busy_percent": 2, "total_mb": 81559},
    "H200": {"name": "NVIDIA H200", "used_mb": 1, "busy_percent": 2, "total_mb": 143771},
    "no name": {"used_mb": 1, "busy_percent": 2, "total_mb": 143771},
}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (["H100"], "1 × NVIDIA H100 80GB HBM3, 79.6 GiB"),
        (["H200"], "1 × NVIDIA H200, 140.4 GiB; planned: 1 × H100"),
        (["H100"] * 2, "2 × NVIDIA H100 80GB HBM3, 79.6 GiB; planned: 1 × H100"),
        (["no name"], "1 × GPU, 140.4 GiB; planned: 1 × H100"),
        ([], "1 × H100, as planned: its samples name no GPU"),
    ],
)
def test_the_machine_is_the_one_that_the_run_found(tmp_path, found, shown):
    folder = challenger_run(tmp_path / "run")
    with (folder / "resolved.yaml").open("a") as config:
        config.write("machine: {device: cuda, gpus: 1, nodes: 1, gpu: H100}\n")
    sample = {"time": STARTED, "component": "host", "gpus": [GPUS[name] for name in found]}
    lines(folder / "samples.jsonl", [sample])
    assert machine_of(RunFolder(folder)) == shown


def test_the_first_screen_shows_hostile_text_as_text_and_each_question_opens_its_trajectory(tmp_path):
    folder = challenger_run(tmp_path / "run", steps=1, rows=1)
    rows = [
        challenger_row(1, n, k=n, question=f"{HOSTILE} {n}?", answer=f"{HOSTILE} indeed") for n in range(4)
    ]
    lines(folder / "dumps" / "step_0001.jsonl", rows)
    page = write_report(folder).read_text(encoding="utf-8")
    first = page[page.index('class="firsts"') : page.index('id="h-charts"')]
    assert "<script>alert" not in first and "<img" not in first and "\u202e" not in first
    assert "&lt;script&gt;alert(1)" in first and "{{7*7}}" in first
    opened = [int(row) for row in re.findall(r'href="#open=(\d+)"', first)]
    data = json.loads(re.findall(r'(?s)<script type="application/json" id="data">(.*?)</script>', page)[0])
    question, score = (data["columns"].index(name) for name in ("question", "score"))
    assert 0 < len(opened) <= 3
    for row, reward in zip(opened, re.findall(r"reward (\d\.\d\d)", first), strict=True):
        assert f"{data['rows'][row][score]:.2f}" == reward and "alert(1)" in data["rows"][row][question]


def test_the_questions_shown_are_distinct_of_the_last_steps_and_differ_in_outcome():
    asked_of = [(1, "old?", 1.5, 2), *[(2, "good?", 1.4, 1)] * 2, (3, "easy?", 0.5, 5), (3, "hard?", 0.4, 0)]
    table = TrajectoryTable(9)
    for step, question, score, k in asked_of:
        table.add(played(step, score, reward={"score": score, "k": k, "n": 5}, question=question))
    table.finish()
    shown = [(one.question, one.row, one.reward) for one in asked(table)]
    assert shown == [("easy?", 3, "0.50"), ("hard?", 4, "0.40"), ("good?", 1, "1.40")]
    assert "5 of 5 attempts gave this answer, too easy" in asked(table)[0].why


def test_of_a_solvers_questions_one_that_it_got_wrong_is_shown():
    table = TrajectoryTable(9)
    for question, score in [("a?", 1.0), ("a?", 0.0), ("b?", 1.0), ("b?", 0.0), ("c?", 1.0)]:
        table.add(played(1, score, question=question))
    table.finish()
    shown = [(one.question, one.reward) for one in asked(table)]
    assert shown == [("a?", "1.00"), ("b?", "0.00"), ("c?", "1.00")]


def test_conversations_that_do_not_compress_are_whole_in_the_page(tmp_path):
    folder = challenger_run(tmp_path / "run", steps=1, rows=1)
    said = [random.Random(n).randbytes(9_500).hex() for n in range(2)]
    rows = [challenger_row(1, n, trajectory=conversation("Who?", "she", thinking=said[n])) for n in range(2)]
    lines(folder / "dumps" / "step_0001.jsonl", rows)
    page = write_report(folder).read_text(encoding="utf-8")
    (pack,) = re.findall(r'class="pack">([^<]*)<', page)
    assert len(pack) > LONGEST
    unpacked = gzip.decompress(base64.b64decode(pack, validate=True)).decode()
    assert all(words in unpacked for words in said)
