"""A run's report in any state of the run, and that nothing from a run acts on the page."""

import html
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import (
    DOCUMENT,
    STARTED,
    added_up,
    challenger_row,
    challenger_run,
    conversation,
    episode_row,
    event,
    lines,
    loop_run,
    played,
    solver_row,
    tally_of,
    trajectories,
)
from omegaconf import DictConfig, OmegaConf
from scipy import stats
from shown_page import Page, page_of, unpacked
from vl_convert import vegalite_to_svg

from data.errors import DataError
from drzero.cli import COMMANDS, main
from drzero.ops.errors import RunFailed, UserError
from drzero.ops.process.lock import HeldLock
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.recipe.compose import write_resolved
from drzero.runs.report.charts import Chart, page_spec, scores_chart, training_charts
from drzero.runs.report.checklist import RunCheck, component_states, training_checks
from drzero.runs.report.conversation import shown_turns
from drzero.runs.report.figures import Tally, extremes
from drzero.runs.report.inspect_log import write_log
from drzero.runs.report.loop import changed
from drzero.runs.report.page import embedded_json
from drzero.runs.report.reasons import explain
from drzero.runs.report.table import TrajectoryTable
from drzero.runs.report.text import LONGEST, answer_pattern, highlighted, visible
from drzero.runs.report.trajectories import read_trajectories
from drzero.runs.report.watch import LivePage, live_server
from drzero.runs.report.write import reported, write_report
from drzero.runs.run_folder import RunFolder
from drzero.stages.examples import challenger_examples
from verl_ext.method.trajectory import SearchCall, Turn
from verl_ext.method.trajectory import Trajectory as Conversation

Printed = pytest.CaptureFixture[str]


def charts_of(folder: Path, tally: Tally | None = None) -> dict[str, Chart]:
    """By name."""
    return {chart.name: chart for chart in training_charts(RunFolder(folder), tally or tally_of(folder))}


def answers_of(folder: Path) -> dict[str, RunCheck]:
    return {check.question: check for check in training_checks(RunFolder(folder), tally_of(folder))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return challenger_run(tmp_path_factory.mktemp("report") / "demo")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run of one step with one trajectory."""
    return challenger_run(tmp_path / "run", steps=1, rows=1)


def test_the_head_says_what_ran_how_it_ended_and_how_to_repeat_it(page: Page) -> None:
    for words in (
        "demo finished",
        "challenger (HRPO)",
        "models/demo-policy",
        "1,234",
        "drzero challenger run.name=demo",
        "verl 0.9.1",
    ):
        assert words in page.text


def test_the_cost_comes_from_the_launches_or_from_the_machines_price(tmp_path: Path, small: Path) -> None:
    assert "$" not in page_of(small).text
    with (small / "resolved.yaml").open("a") as config:
        config.write("compute: {provider: modal, type: H100, count: 8, cpu: 0, memory: 0, region: null}\n")
        config.write("machine: {device: cuda, gpus: 8, nodes: 2, gpu: H100}\n")
    assert "$4.48 at $63.19 an hour" in page_of(small).text  # 255 seconds of two nodes
    call = {"launch": "a", "part": 0, "began": 0.0, "until": 1800.0, "usd_per_hour": 36.0}
    (tmp_path / "launches" / "run").mkdir(parents=True)
    (tmp_path / "launches" / "run" / "spend.json").write_text(json.dumps([call, call]))
    assert "$36.00 for all its launches" in page_of(small).text


def test_the_file_loads_nothing_and_its_policy_admits_only_its_two_scripts(run: Path, page: Page) -> None:
    assert all(not link.startswith(("http:", "https:", "//", "file:")) for link in page.links)
    assert {"iframe", "img", "object", "embed", "base"}.isdisjoint(page.elements)
    assert len(page.blocks(None)) == 2
    text = (run / "report.html").read_text(encoding="utf-8")
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]+)"', text)[0])
    assert policy.count("'sha256-") == 2
    assert "connect-src 'none'" in policy and "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_every_chart_of_a_run_compiles_and_the_page_has_a_place_for_it(run: Path, page: Page) -> None:
    charts = charts_of(run)
    expected = {"reward", "valid", "searched", "solved", "entropy", "phases", "flow-rates", "cpu", "memory"}
    assert expected <= set(charts) == set(page.data["charts"])
    for chart in charts.values():
        assert "<path" in vegalite_to_svg({**page_spec(chart), "width": 300})


def test_a_mark_between_two_steps_adds_no_step_to_the_axis(page: Page) -> None:
    drawn = vegalite_to_svg({**page.data["charts"]["reward"], "width": 300})
    assert re.findall(r">(\d)</text>", drawn) == ["1", "2", "3"]


def test_events_are_marked_at_their_place_on_the_axis_of_steps(run: Path, page: Page) -> None:
    marks = {mark.kind: mark for mark in RunFolder(run).marks}
    assert marks["restart"].step == pytest.approx(1.5)  # half of step 2, which lies between 1 and 2
    assert marks["alarm"].step == 3.0 and "collapse alarm [entropy]" in marks["alarm"].text
    for name, places in {"reward": [1.5, 3], "entropy": [1.5, 3], "solved": [2, 3], "phases": [2, 3]}.items():
        layers = page.data["charts"][name]["layer"]
        values = [value for layer in layers for value in layer.get("data", {}).get("values", ())]
        assert [(v["kind"], v["at"]) for v in values] == [*zip(("restart", "alarm"), places, strict=True)]


def test_the_check_list_answers_from_the_data(run: Path) -> None:
    answers = {question: check.answer for question, check in answers_of(run).items()}
    assert answers.pop("Is it free of collapse alarms?") == "no"
    for question in (
        "Do rollouts finish?",
        "Did the buffer fill and the warm-up end?",
        "Are all steps done?",
        "Does every trajectory count?",
    ):
        assert answers[question] == "yes"
    ended = answers_of(run)["Did the buffer fill and the warm-up end?"]
    assert ended.evidence == "complete after 75.4 s"  # as the diagnosis has it
    states = {state.name: state for state in component_states(RunFolder(run))}
    assert (states["retrieval"].restarts, states["retrieval"].good, states["trainer"].good) == (1, True, True)


def test_an_environments_run_is_drawn_by_its_own_parts_and_solved_tasks_and_needs_no_search(
    tmp_path: Path,
) -> None:
    lines(tmp_path / "dumps" / "step_0001.jsonl", [episode_row(1), episode_row(1, 1, success=True)])
    shown = {name: chart.spec["data"]["values"] for name, chart in charts_of(tmp_path).items()}
    assert {row["name"]: row["mean"] for row in shown["reward"]} == {"reward": 0.6, "greens": 0.2, "won": 0.5}
    assert [(row["name"], row["mean"]) for row in shown["tasks"]] == [("solved", 0.5)]
    assert shown.keys() == {"reward", "tasks"}
    assert "Do multi-hop trajectories search?" not in answers_of(tmp_path)


@pytest.mark.parametrize(("left_by", "answer"), [("filtered", "yes"), ("stale", "no")])
def test_samples_that_the_filter_left_out_are_not_lost(run: Path, left_by: str, answer: str) -> None:
    snapshots = [json.loads(line) for line in (run / "flow.jsonl").read_text().splitlines()]
    snapshots[-1]["samples"][left_by] = 20.0
    lines(run / "flow.jsonl", snapshots)
    check = answers_of(run)["Did every sample reach the update?"]
    assert check.answer == answer and "20" in check.evidence


def test_a_component_that_stopped_before_it_was_ready_is_not_well(small: Path) -> None:
    events = [event(0, "start", "solver", "starting"), event(9, "stopped", "solver", "stopped")]
    lines(small / "logs" / "events.jsonl", events)
    (state,) = component_states(RunFolder(small))
    assert (state.ready, state.good) == ("never", False)


def test_a_check_without_a_record_is_left_out(small: Path) -> None:
    lines(small / "metrics" / "attempt_001.jsonl", [{"step": 1, "data": {"training/global_step": 1}}])
    assert "Are the tokens trained on the tokens sampled?" not in answers_of(small)


def test_a_killed_run_says_so_with_the_step_it_was_in_and_what_to_do(tmp_path: Path) -> None:
    folder = challenger_run(tmp_path / "run")
    events = [event(0, "start", "retrieval"), event(21, "start", "trainer", offset=0)]
    events.append(event(90, "checkpoint", "trainer", "checkpoint of step 2"))
    lines(folder / "logs" / "events.jsonl", events)
    (folder / "result.json").unlink()
    dump = folder / "dumps" / "step_0003.jsonl"
    dump.write_bytes(dump.read_bytes()[:-40])  # cut in the middle of its last line
    page = page_of(folder)
    assert "run cut off" in page.text and "What to do: rerun it" in page.text
    assert page.text.count("not well") == page.text.count("no word of its end: killed with the run") == 2
    assert "1 lines hold no trajectory that can be read: dumps/step_0003.jsonl:4" in page.text
    assert len(page.data["rows"]) == 11


def test_a_run_without_events_is_judged_by_its_result_else_by_its_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("INFO start\nRuntimeError: step 3 failed\n")
    assert "RuntimeError: step 3 failed" in page_of(tmp_path).text
    (tmp_path / "result.json").write_text(json.dumps({"outputs": {}, "tokens": 1, "figures": {}}))
    assert RunFolder(tmp_path).ending.state == "finished"


METRICS, DUMP = "metrics/attempt_001.jsonl", "dumps/step_0001.jsonl"
UNREAD = f"1 lines hold no trajectory that can be read: {DUMP}:1"


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        (METRICS, b'100.0}}\n', b'100.0}', f"1 lines, 0 values of {METRICS}"),
        (METRICS, b'"drzero/collapse/entropy"', b'"drzero/collapse/\xff"', f"1 lines, 0 values of {METRICS}"),
        (METRICS, b"0.3", b"true", f"0 lines, 1 values of {METRICS}"),
        (METRICS, b'"step": 1,', b'"step": "1",', f"1 lines, 0 values of {METRICS}"),
        (METRICS, b'"data": {', b'"data": null, "was": {', f"1 lines, 0 values of {METRICS}"),
        ("heartbeats.jsonl", b'"step": 1,', b'"step": true,', "1 lines of heartbeats.jsonl"),
        ("samples.jsonl", b"0.5", b'"half"', "1 lines of samples.jsonl"),
        ("flow.jsonl", b'"depth": 3.0', b'"depth": []', "1 lines of flow.jsonl"),
        ("logs/events.jsonl", b'"kind": "start"', b'"kind": null', "1 lines of logs/events.jsonl"),
        (DUMP, b'"score": ', b'"score": NaN, "was": ', "1 of 12 are left out"),
        (DUMP, b'"score": ', b'"score": true, "was": ', UNREAD),
        (DUMP, b'"hop": 1', b'"hop": ' + b"[" * 9000, UNREAD),
        (DUMP, b'"n": 5', b'"n": 5000000000', UNREAD),
        (DUMP, b'"step": 1', b'"step": -1', UNREAD),
    ],
)  # fmt: skip
def test_a_bad_line_or_value_costs_itself_and_is_counted_on_the_page(
    tmp_path: Path, name: str, old: bytes, new: bytes, told: str
) -> None:
    folder = challenger_run(tmp_path / "run")
    whole = set(page_of(folder).data["charts"])
    content = (folder / name).read_bytes()
    assert old in content
    (folder / name).write_bytes(content.replace(old, new, 1))
    page = page_of(folder)
    assert told in page.text and set(page.data["charts"]) == whole
    kept = challenger_examples(folder)
    assert kept.accepted and kept.rejected


def test_what_is_no_file_among_the_dumps_is_named_and_costs_itself(tmp_path: Path) -> None:
    folder = challenger_run(tmp_path / "run", steps=1)
    os.mkfifo(folder / "dumps" / "step_0002.jsonl")
    (folder / "dumps" / "step_0003.jsonl").mkdir()
    (folder / "dumps" / "step_0004.jsonl").symlink_to("step_0004.jsonl")
    page = page_of(folder)
    assert len(page.rows) == 4 and "3 lines hold no trajectory that can be read" in page.text
    assert "dumps/step_0002.jsonl (not a regular file)" in page.text
    assert len(challenger_examples(folder).accepted) == 3
    write_log(RunFolder(folder))


def test_an_empty_run_has_a_page_without_curves(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("method: hrpo\n")
    page = page_of(tmp_path)
    assert "Nothing is recorded that could be drawn" in page.text and "There are none." in page.text
    assert "Did training start? no" in page.text
    assert "Did it move all the time? no record" in page.text


def test_a_folder_without_a_run_is_refused_with_the_runs_in_it(tmp_path: Path, capsys: Printed) -> None:
    challenger_run(tmp_path / "plain" / "demo")
    for seed in (1, 2):
        loop_run(tmp_path / "seeds" / f"seed{seed}")
    for folder, inside in (("plain", "demo"), ("seeds", "seed1/evolve, seed2/evolve")):
        assert main(["report", str(tmp_path / folder)]) == 2
        assert f"runs in it: {inside}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "name one folder"),
        (["report", "a", "b"], "name one folder"),
        (["report", "a", "--port", "80"], "name one folder"),
        (["report", "a" * 5000], "is no folder"),
        (["diagnose", "a\0b"], "is no folder"),
        (["report", "a", "--watch", "--port", "http"], "is no port"),
        (["export-log", "--all"], "takes one argument: the folder of a run"),
        (["stacks"], "takes one argument: the folder of a run"),
        (["top", "one", "two"], "takes one argument: the folder of a run"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], message: str, capsys: Printed) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31mred\x00 "
    "\u202egnp.exe\u2066 \ud83d <!--<script> {{ 7*7 }} &lt; \u2028"
)


def test_hostile_text_is_shown_and_never_acts(small: Path) -> None:
    row = challenger_row(1, question=HOSTILE, answer=f"{HOSTILE} indeed")
    row["doc_id"] = row["key"] = HOSTILE
    row["attempts"][0]["answer"] = HOSTILE
    lines(small / "dumps" / "step_0001.jsonl", [row])
    kinds = ((0, "crash"), (150, "restart"), (160, "alarm"))
    lines(small / "logs" / "events.jsonl", [event(at, kind, HOSTILE, HOSTILE) for at, kind in kinds])
    page = page_of(small)
    (shown,) = page.conversations
    for part in (page, Page(shown)):
        assert len(part.blocks(None)) == (2 if part is page else 0)
        assert "img" not in part.elements
        assert "</script><script>alert(1)</script>" in part.text
        for words in ("␛[31mred␀", "⟨U+202E⟩gnp.exe⟨U+2066⟩", "{{ 7*7 }}"):
            assert words in part.text
    assert "⟨U+202E⟩" in page.rows[0]["question"] and "⟨U+D83D⟩" in page.rows[0]["question"]


def test_a_megabyte_in_one_line_is_cut_in_the_page_and_whole_in_the_log(small: Path) -> None:
    long = "a" * (1 << 20)
    row = challenger_row(1, trajectory=conversation("Who?", "B", thinking=long))
    lines(small / "dumps" / "step_0001.jsonl", [row])
    (shown,) = page_of(small).conversations
    assert "characters are left out here: see dumps/step_0001.jsonl, line 1]" in shown
    assert "a" * (LONGEST - 100) in shown and len(shown) < 4 * LONGEST
    assert long in write_log(RunFolder(small)).read_text(encoding="utf-8")


@given(
    st.recursive(st.text() | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_data_stands_in_a_script_block_without_ending_it(value: Any) -> None:
    text = str(embedded_json({"value": value}))
    assert "<" not in text and text.isascii()
    json.loads(text)


@given(st.text(), st.text())
def test_highlighting_changes_no_word_of_a_text(text: str, answer: str) -> None:
    marked = str(highlighted(text, answer_pattern(answer)))
    plain = html.unescape(marked.replace("<mark>", "").replace("</mark>", ""))
    assert plain == html.unescape(html.escape(visible(text)))


def test_the_answer_is_found_whatever_its_case_and_punctuation() -> None:
    said = "The mayor, Brurbul-LERNIN, is old; Brurbul Lernins is not."
    marked = highlighted(said, answer_pattern("Brurbul Lernin"))
    assert str(marked).count("<mark>") == 1 and "<mark>Brurbul-LERNIN</mark>" in str(marked)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<think>a < b</think>\n<answer>c</answer>", [("think", "a &lt; b"), ("answer", "c")]),
        ("<think>a<think>b</think>c", [("think", "a&lt;think&gt;b"), ("text", "c")]),
        ("<think>a<answer>b</think>", [("think", "a&lt;answer&gt;b")]),
        ("<think>a<tool_call>{}</tool_call>", [("think", "a&lt;tool_call&gt;{}&lt;/tool_call&gt;")]),
        ("a<think>b<think>c", [("text", "a"), ("think", "b&lt;think&gt;c")]),
        ("a</think>b<answer>c</answer>", [("think", "a"), ("text", "b"), ("answer", "c")]),
        ("a<tool_call>{}</tool_call>b", [("text", "a"), ("text", "b")]),
    ],
)
def test_a_turn_is_shown_in_its_tagged_stretches(text: str, pieces: list[tuple[str, str]]) -> None:
    (turn,) = shown_turns(Conversation((Turn(text),)), None, "dump")
    assert turn.pieces == pieces


def test_a_trajectory_opens_with_its_turns_passages_evidence_and_attempts(page: Page) -> None:
    shown = Page(page.conversations[2])  # hop 3, two of five attempts right
    assert "I will ask." in shown.text and "“query 0”" not in shown.text and "query 0" in shown.text
    assert 'class="evidence"' in page.conversations[2]
    assert "solver, 5 attempts" in shown.text and shown.text.count("right Brurbul Lernin") == 2
    assert "2 of 5 solver attempts gave this answer: (5 − 2) / (5 − 1)" in shown.text
    assert "dumps/step_0001.jsonl" in shown.links


def parts_of(row: dict[str, Any], folder: Path) -> dict[str, str]:
    lines(folder / "dumps" / "step_0001.jsonl", [row])
    (trajectory,) = trajectories(folder)
    return {part.name: part.reason for part in explain(trajectory)}


NEW = "found passages with a new query"
ATTEMPTS = "solver attempts gave this answer"
SAID = conversation("", "Brurbul Lernin")
SAID_TWICE = Conversation((Turn("<answer>Brurbul Lernin</answer>" * 2),))
CUT_OFF = Conversation((replace(SAID.turns[-1], truncated=True),))


@pytest.mark.parametrize(
    ("row", "part", "reason"),
    [
        (challenger_row(1, k=0), "difficulty", f"0 of 5 {ATTEMPTS}: too hard, or its answer"),
        (challenger_row(1, k=5), "difficulty", f"5 of 5 {ATTEMPTS}: too easy"),
        (challenger_row(1, hop=1), "tool", "one hop needs no search"),
        (challenger_row(1, hop=3), "tool", f"1 turn {NEW}: min((1 + 1) / 3 hops, 1)"),
        (challenger_row(1, trajectory=conversation("Who?", "B", 0)), "tool", f"0 turns {NEW}, 2 hops take 1"),
        (challenger_row(1), "answer_part", "a retrieved passage has the answer, 2 words"),
        (challenger_row(1, answer="Vizmam"), "answer_part", "a question of several hops, but its own doc"),
        (challenger_row(1, hop=1, answer="Vizmam"), "answer_part", "its document has the answer, 1 word"),
        (challenger_row(1, answer="Yes"), "answer_part", "yes or no"),
        (challenger_row(1, answer="Oslo"), "answer_part", "neither its document nor a retrieved passage has"),
        (challenger_row(1, question="Is Oslo Oslo?", answer="Oslo"), "integrity", "the question contains"),
        (challenger_row(1, k=None), "reward", "counts in no statistic: fewer than 5 solver attempts"),
        (solver_row(1, SAID), "exact match", "the answer is a target, normalized “brurbul lernin”"),
        (solver_row(1, SAID, target="Oslo"), "exact match", "the answer is no target"),
        (solver_row(1, Conversation((Turn("Lernin"),))), "exact match", "the last turn gives no <answer>"),
        (solver_row(1, SAID_TWICE), "exact match", "the last turn gives several answers"),
        (solver_row(1, CUT_OFF), "exact match", "the last turn was cut off"),
    ],
)
def test_each_part_of_a_reward_has_its_reason(
    row: dict[str, Any], part: str, reason: str, tmp_path: Path
) -> None:
    assert parts_of(row, tmp_path)[part].startswith(reason)


def test_rows_that_a_failed_service_spoiled_are_in_the_table_and_in_no_mean(tmp_path: Path) -> None:
    lines(tmp_path / "dumps" / "step_0001.jsonl", [challenger_row(1, k=1), challenger_row(1, 1, k=None)])
    tally = tally_of(tmp_path)
    assert (tally.trajectories, tally.invalid) == (2, 1)
    assert [estimate.n for estimate in tally.means("reward")] == [1]
    page = page_of(tmp_path)
    assert page.rows[1]["score"] is None and page.rows[1]["failures"] == "not counted: a service failed"
    assert "Does every trajectory count? no 1 of 2" in page.text


def agent_row(number: int, place: int, places: dict[str, Any], **agent: Any) -> dict[str, Any]:
    row = episode_row(1, number)
    turns = row["trajectory"]["turns"] * (place + 1)
    calls = [{"extends": None, "row": 0, "tokens": 7, "began": None}]
    calls.append({"extends": 0, "row": 1, "tokens": 1, "began": None})
    told = {"calls": calls, "places": places, "faults": [], "rewards": [0.5, -0.3], **agent}
    return row | {"key": f"p_{number}_{place}", "trajectory": {"opening": [], "turns": turns}, "agent": told}


def test_the_rows_of_an_agents_episode_are_one_trajectory_with_a_tree_of_calls(tmp_path: Path) -> None:
    again = {"name": "raised", "text": f"it raised ValueError: {HOSTILE}"}
    rows = [agent_row(0, 0, {"0": [0, 7]}), agent_row(0, 1, {"1": [9, 10]})]
    one_call = rows[0]["agent"]["calls"][:1]
    rows.append(agent_row(1, 0, {"0": [0, 7]}, calls=one_call, rewards=[0.2], faults=[again]))
    late = {"name": "timed_out", "text": "it did not end"}
    rows.append(agent_row(2, 0, {"0": [0, 7]}, faults=[again, late]))
    rows[3]["reward"] |= {"valid": False, "reason_invalid": "it did not end"}
    lines(tmp_path / "dumps" / "step_0001.jsonl", rows)
    page = page_of(tmp_path)
    failures = ["", "begun again: raised", "not counted: timed out, begun again: raised"]
    shown = [(row["turns"], row.get("failures", "")) for row in page.rows]
    assert shown == [*zip((2, 1, 1), failures, strict=True)]
    two, one, failed = (Page(shown) for shown in page.conversations)
    assert "2 model calls in 2 rows row 1 begins the episode: call 1 (7 tokens, reward 0.5)" in two.text
    assert "row 2 branches from call 1: call 2 (1 token, reward -0.3) trains 1 of its 8 sampled" in two.text
    assert "call 1, which another row trains" in two.text and "the sum of 2 calls" in two.text
    assert "1 model call in one row: call 1 (7 tokens, reward 0.2)" in one.text
    assert "conversation turn 1" in one.text
    assert "try 1: it raised ValueError: </script><script>" in one.text and "img" not in one.elements
    assert "trains nothing" not in two.text and "try 2" not in failed.text
    assert "Did the agent succeed at each first try? no raised 2, timed out 1" in page.text
    assert tally_of(tmp_path).means("reward")[0].n == 2


WEIGHED = [("reward", "weight 0"), ("b", "weight 2"), ("reward", "the parts by their weights")]


@pytest.mark.parametrize(
    ("parts", "agent", "shown"),
    [
        ({}, {"rewards": []}, [("reward", "as the agent returned it")]),
        ({"reward": 0.2, "f1": 0.5}, {"rewards": []}, [("f1", ""), ("reward", "as the agent returned it")]),
        ({"a": 0.1, "b": 0.3}, {"rewards": []}, [("a", ""), ("b", ""), ("reward", "the mean of the parts")]),
        ({"reward": 0.2, "b": 0.3}, {"rewards": [], "weights": {"b": 2.0}}, WEIGHED),
        ({}, {}, [("reward", "the sum of 2 calls")]),
    ],
)
def test_an_agents_reward_says_what_it_is_made_of(parts, agent, shown, tmp_path):
    row = agent_row(0, 0, {"0": [0, 7]}, **agent)
    row["reward"]["parts"] = parts
    lines(tmp_path / "dumps" / "step_0001.jsonl", [row])
    (found,) = trajectories(tmp_path)
    assert [(part.name, part.reason) for part in explain(found)] == shown


@pytest.mark.parametrize(
    "damage",
    [
        {"calls": [{"extends": 0, "row": 0, "tokens": 1, "began": None}]},  # its own follower
        {"calls": [{"extends": None, "row": -1, "tokens": 1, "began": None}]},
        {"calls": None},
        {"faults": ["raised"]},
        {"rewards": [0.5]},
    ],
)
def test_a_damaged_tree_of_calls_costs_its_line(damage: dict[str, Any], tmp_path: Path) -> None:
    rows = [agent_row(0, 0, {"0": [0, 7]}, **damage), episode_row(1, 1)]
    lines(tmp_path / "dumps" / "step_0001.jsonl", rows)
    unreadable: list[str] = []
    assert [row.key for row in read_trajectories(RunFolder(tmp_path), unreadable)] == ["row-1-1_0_0"]
    assert unreadable == ["dumps/step_0001.jsonl:1"]


SHORTCUT = "2 right with fewer searches than hops"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (challenger_row(1, hop=1, k=5), "too easy"),
        (challenger_row(1, k=0), "too hard, or its answer is wrong"),
        (challenger_row(1, hop=1, k=2), "some right"),
        (challenger_row(1, hop=2, k=2), f"some right; {SHORTCUT}"),
        (challenger_row(1, k=None), ""),
        (solver_row(1, Conversation(SAID.turns[-1:])), "1 right with fewer searches than hops"),
        (solver_row(1, Conversation(SAID.turns[-1:]), "Porlal"), ""),
        (solver_row(1, SAID) | {"hop": 1}, ""),
    ],
)
def test_the_table_says_how_hard_a_question_proved_and_which_took_a_shortcut(row, verdict, tmp_path):
    lines(tmp_path / "dumps" / "step_0001.jsonl", [row])
    assert page_of(tmp_path).rows[0].get("verdict", "") == verdict


def test_faults_in_a_conversation_are_named() -> None:
    call = SearchCall("{", None, error="the call is not JSON")
    turns = (Turn("x", (call, SearchCall("", ("q",), None, True, "timed out")), truncated=True),)
    trajectory = played(1, 0.0, reward={"integrity_fault": "no_answer"}, conversation=Conversation(turns))
    assert trajectory.failures == ["no answer", "a search failed", "an invalid call", "a turn cut off"]


def test_a_mean_has_students_interval_and_a_single_value_none() -> None:
    (one,) = added_up([played(1, 0.5)]).means("reward")
    assert (one.mean, one.low, one.high, one.n) == (0.5, None, None, 1)
    values = [0.0, 0.5, 1.0, 1.0]
    (some,) = added_up(played(1, value) for value in values).means("reward")
    scale = stats.tstd(values) / len(values) ** 0.5
    assert (some.low, some.high) == pytest.approx(stats.t.interval(0.95, 3, loc=some.mean, scale=scale))


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=60), st.integers(2, 30))
def test_a_long_series_keeps_its_peaks_and_dips_in_order(values: list[int], at_most: int) -> None:
    points = [(float(time), float(value)) for time, value in enumerate(values)]
    kept = extremes(points, itemgetter(1), at_most)
    assert len(kept) <= at_most + 1 and set(kept) <= set(points) and kept == sorted(kept)
    assert {min(values), max(values)} <= {value for _, value in kept}


def test_a_long_run_has_a_page_of_the_size_of_a_short_one(tmp_path: Path) -> None:
    steps = range(1, 3001)
    data = {"drzero/collapse/entropy": 0.5, "training/global_step": 1}
    metrics = ({"step": s, "data": data | {"drzero/val/em": float(s == 1234)}} for s in steps)
    lines(tmp_path / "metrics" / "attempt_001.jsonl", metrics)
    phases = ((0, "rollout"), (6, "save"))
    rows = ({"time": 10.0 * s + after, "step": s, "phase": phase} for s in steps for after, phase in phases)
    lines(tmp_path / "heartbeats.jsonl", rows)
    alarms = (event(0, "alarm", "trainer", "x" * 5000, step=s) | {"time": 10.0 * s} for s in steps)
    lines(tmp_path / "logs" / "events.jsonl", alarms)
    usage = ({"time": 1.0, "component": f"worker {n}", "cpu_share": 0.5, "rss_mb": 7} for n in steps)
    lines(tmp_path / "samples.jsonl", usage)
    tally = added_up(played(s, float(s), reward={"score": 0.0, "k": s % 6, "n": 5}) for s in steps)
    charts = {name: chart.spec for name, chart in charts_of(tmp_path, tally).items()}
    assert {"reward", "solved", "entropy", "validation", "phases", "cpu"} <= charts.keys()
    for name, spec in charts.items():
        assert len(spec["data"]["values"]) <= (1500 if name == "solved" else 500), name
        assert len(json.dumps(spec)) < 300_000
    assert max(row["high"] for row in charts["validation"]["data"]["values"]) == 1.0  # no peak is lost
    assert sum(len(layer["data"]["values"]) for layer in charts["entropy"]["layer"] if "data" in layer) <= 200
    (tmp_path / "resolved.yaml").write_text("method: hrpo\n")
    assert len(write_report(tmp_path).read_bytes()) < 5_000_000


def series_of(spec):
    return {row["name"] for row in spec["data"]["values"]}


@pytest.mark.parametrize(
    ("points", "series"), [(1, [1]), (5, [5]), (6, [5, 1]), (11, [5, 5, 1]), (60, [5, 5, 5, 5, 5])]
)
def test_a_chart_has_at_most_five_series_and_those_that_hold_most_are_shown_first(tmp_path, points, series):
    (tmp_path / "logs").mkdir()
    held = {f"point {n}": {"depth": float(n), "errors": 0.0} for n in range(points)}
    samples = {"asked": 1.0, "produced": 1.0}
    flow = [{"time": STARTED + s, "points": held, "samples": samples, "warmup": False} for s in (0, 60)]
    lines(tmp_path / "flow.jsonl", [record | {"waiting": None, "symptoms": []} for record in flow])
    charts = [*charts_of(tmp_path).values()]
    assert [len(series_of(chart.spec)) for chart in charts] == series
    assert [chart.folded for chart in charts] == [False] + [True] * (len(series) - 1)
    assert len(set().union(*(series_of(chart.spec) for chart in charts))) == sum(series)
    assert f"point {points - 1}" in series_of(charts[0].spec)


def test_phases_beyond_five_are_drawn_as_one(tmp_path):
    beats = [{"time": 10.0 * n + n * n, "step": 1, "phase": f"phase {n}"} for n in range(1, 9)]
    lines(tmp_path / "heartbeats.jsonl", beats)
    chart = charts_of(tmp_path)["phases"]
    seconds = {row["phase"]: row["seconds"] for row in chart.spec["data"]["values"]}
    assert list(seconds) == ["other", "phase 4", "phase 5", "phase 6", "phase 7"]
    assert seconds["phase 7"] == 10 + 64 - 49


def test_one_band_at_a_time_is_drawn_that_of_the_most_trajectories(run, page):
    chart = charts_of(run)["valid"]
    band, *_ = chart.spec["layer"][:2]
    assert band["params"][0]["value"] == [{"name": "1 hop"}]  # two of its four rows a step
    assert band["encoding"]["opacity"]["value"] == 0 and "the name that you click" in chart.about
    drawn = vegalite_to_svg({**page.data["charts"]["valid"], "width": 300})
    opacities = re.findall(r'aria-roledescription="area mark".*?opacity="([\d.]+)"', drawn)
    assert sorted(opacities) == ["0", "0", "0.22"]


@pytest.mark.parametrize(
    ("scores", "domain"),
    [([0.2, 0.4], [0, 1]), ([0.9, 1.0], [0, 1]), ([0.2, 1.2], [0, 1.5]), ([-0.3, 0.1], [-0.5, 1])],
)
def test_runs_have_one_scale_unless_a_value_needs_more(scores, domain):
    tally = added_up(played(step, score) for step, score in enumerate(scores, 1))
    chart = charts_of(Path(__file__).parents[1] / "recorded" / "demo", tally)["reward"]
    (line,) = (layer for layer in chart.spec["layer"] if layer.get("mark", {}).get("type") == "line")
    assert line["encoding"]["y"]["scale"]["domain"] == domain


def test_points_of_a_long_run_pool_its_steps_and_lose_no_trajectory():
    tally = added_up(played(step, float(step % 2), hop=2) for step in range(1, 131))
    for estimates in (tally.means("reward"), tally.shares("right")):
        assert len(estimates) == 44 and sum(one.n for one in estimates) == 130
        assert (estimates[0].since, estimates[0].step, estimates[0].mean) == (1, 3, 2 / 3)
        assert (estimates[-1].since, estimates[-1].step) == (130, 130)


def test_too_many_trajectories_leave_some_of_every_step(tmp_path: Path) -> None:
    for step in range(1, 11):
        rows = [challenger_row(step, number) for number in range(10)]
        lines(tmp_path / "dumps" / f"step_{step:04d}.jsonl", rows)
    table = filled(tmp_path, row_limit=30)
    steps = {row[table.columns.index("step")] for row in table.rows}
    assert (len(table), table.total, steps) == (25, 100, set(range(1, 11)))


def filled(folder: Path, **limits: int) -> TrajectoryTable:
    found = trajectories(folder)
    table = TrajectoryTable(len(found), **limits)
    for trajectory in found:
        table.add(trajectory)
    table.finish()
    return table


def test_too_many_conversations_leave_some_of_every_part_of_the_run(tmp_path: Path) -> None:
    for step in range(1, 11):
        rows = [challenger_row(step, number) for number in range(20)]
        lines(tmp_path / "dumps" / f"step_{step:04d}.jsonl", rows)
    whole = sum(map(len, filled(tmp_path).packs))
    for limit in (whole // 2, 1):
        table = filled(tmp_path, pack_limit=limit)
        assert len(table.packs) == 1 or sum(map(len, table.packs)) <= limit
        packed = [one for pack in table.packs for one in unpacked(pack)]
        opened = [row for row in table.rows if row[-1] is not None]
        assert 0 < len(opened) == table.opened == len(packed) < len(table) == 200
        for *_, source, line, place in opened:
            assert f"{source}, line {line}<" in packed[place]
        if limit > 1:
            places = [place for place, row in enumerate(table.rows) if row[-1] is not None]
            assert max(after - before for before, after in pairwise([0, *places, 200])) < 120


def test_the_loops_page_has_its_iterations_side_by_side_and_what_the_gates_refused_with_examples(tmp_path):
    folder = loop_run(tmp_path)
    page = page_of(folder)
    assert "evolve not finished" in page.text and "solver_iter1: drzero solver: retrieval died" in page.text
    for words in (
        "It ended in solver_iter1: 4 of 5 stages are complete.",
        "before training iteration 1 exact match, 95 % interval demo_1hop 0.25 0.15 to 0.35 0.50 0.40",
        "prompts that gave a pair, 2 hops – 0 of 1 pairs refused, evidence – 1 of 1 pairs refused, contamin",
        "challenger – 1.0 min synthesize – 1.0 min solver – 0.1 min failed merge – – evaluate 1.0 min",
        "together 1.0 min 3.1 min This machine has no price",
        "solver_iter1: drzero solver: retrieval died",
        "demo_1hop iteration 1 40 0.500 0.400 to 0.600",
        "demo_1hop base iteration 1 3 1 1 +0.000",
        "evidence , synthesize_iter1: 1 of 1 pairs Who is it? her evidence: her is in no text",
    ):
        assert words in page.text
    assert set(page.data["charts"]) == {"scores-0"}
    stages = {row["stage"] for row in page.rows}
    assert stages == {"evaluate_iter0", "challenger_iter1", "synthesize_iter1", "evaluate_iter1"}
    assert RunFolder(tmp_path).folder == folder  # the folder above leads there too


def test_questions_that_changed_are_named_either_way_and_open_as_before_and_after(tmp_path):
    page = page_of(loop_run(tmp_path))
    won = "wrong → right: 1 of 3 questions Where is <b>it</b>, 1? before, 1 search: wrong Vizmam"
    assert won in page.text
    assert "after, 1 search: wrong Porlal" in page.text and "right → wrong: 1 of 3 questions" in page.text
    opened = [page.rows[int(link.partition("=")[2])] for link in page.links if link.startswith("#open=")]
    stages = ("evaluate_iter0", "evaluate_iter1") * 2
    shown = [(row["stage"], row["score"]) for row in opened]
    assert shown == [*zip(stages, (0, 1, 1, 0), strict=True)]


def test_of_many_questions_that_changed_three_are_shown_of_each_kind_with_the_most_hops_first(tmp_path):
    folder = RunFolder(loop_run(tmp_path))
    places = [(hop, number) for hop in (1, 2, 3) for number in range(5)]
    rows = [
        {"stage": stage, "question": f"{hop} {number}", "hop": hop, "score": score, "place": 0, "answer": "x"}
        for stage, score in (("evaluate_iter0", 0), ("evaluate_iter1", 1))
        for hop, number in places
    ]
    found = changed(folder, [*rows, rows[0] | {"question": "only before"}])
    assert [pair.question for pair in found["wrong → right"]] == ["3 0", "2 0", "1 0"]
    assert found["right → wrong"] == []
    assert not any(changed(folder, [row | {"place": None} for row in rows]).values())


def test_a_stages_dollars_are_its_time_at_its_machines_price(tmp_path):
    folder = loop_run(tmp_path)
    config = "compute: {provider: modal, type: H100, count: 8, cpu: 0, memory: 0, region: null}\n"
    config += "machine: {device: cuda, gpus: 8, nodes: 1, gpu: H100}\n"
    for stage in ("challenger_iter1", "evaluate_iter0"):
        with (tmp_path / stage / "resolved.yaml").open("a") as file:
            file.write(config)
    page = page_of(folder)
    assert "challenger – 1.0 min $0.53 synthesize – 1.0 min $0.53" in page.text  # 60 s of $31.59 an hour
    assert "together 1.0 min $0.53 3.1 min $1.62" in page.text


def test_a_loop_that_goes_on_says_what_runs_for_how_long_and_what_is_to_come(tmp_path):
    folder, started = loop_run(tmp_path), time.time() - 120
    solver = {"state": "running", "error": None, "seconds": 60.0, "started": started}
    change_stages(folder, solver_iter1=solver, merge_iter1={"state": "pending"})
    with HeldLock(folder / "lock"):
        page = page_of(folder)
    assert "evolve running" in page.text and "not finished" not in page.text
    assert "solver_iter1 has run for 3.0 minutes: 4 of 6 stages are complete." in page.text
    assert "solver – 3.0 min running merge – – to come" in page.text
    (folder / "logs").mkdir()
    (folder / "logs" / "solver_iter1.log").write_text("killed after half a minute")
    os.utime(folder / "logs" / "solver_iter1.log", (started + 30,) * 2)
    page = page_of(folder)
    assert "evolve not finished" in page.text and "solver_iter1: killed" in page.text
    assert "solver – 1.5 min killed merge – – not begun" in page.text
    assert "It ended in solver_iter1: 4 of 6 stages are complete." in page.text


def change_stages(loop: Path, **stages: dict[str, Any]) -> None:
    """Change or add entries of a loop's manifest."""
    manifest = json.loads((loop / "manifest.json").read_text())
    for name, entry in stages.items():
        manifest["stages"][name] = manifest["stages"].get(name, {}) | entry
    (loop / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("evaluations", [(), ("evaluate_iter0",), ("evaluate_iter1",)])
def test_fewer_than_two_finished_evaluations_say_nothing_about_learning(tmp_path, evaluations):
    folder = loop_run(tmp_path)
    failed = {"evaluate_iter0", "evaluate_iter1"} - {*evaluations}
    change_stages(folder, **{name: {"state": "failed"} for name in failed})
    page = page_of(folder)
    assert "Is it learning? Nothing yet. It takes two finished evaluations" in page.text
    assert len(page.data["charts"]) == bool(evaluations) and "→ right" not in page.text


def test_the_head_of_a_loop_has_its_command_and_the_model_and_machine_it_began_with(tmp_path: Path) -> None:
    folder = loop_run(tmp_path)
    with (tmp_path / "evaluate_iter0" / "resolved.yaml").open("w") as config:
        config.write("benchmarks: []\nmachine: {device: cpu, gpus: 1, nodes: 1}\n")
    (tmp_path / "evaluate_iter0" / "report.json").write_text('{"model": "models/demo-policy"}')
    (folder / "resolved.yaml").write_text("# command: /x/drzero evolve loop=demo\niterations: 1\n")
    page = page_of(folder)
    for words in ("command drzero evolve loop=demo", "model models/demo-policy", "machine no GPU"):
        assert words in page.text
    assert {"resolved.yaml", "manifest.json"} <= set(page.links)


def test_a_legend_has_fewer_columns_the_longer_its_names() -> None:
    def columns(*names: str) -> int:
        row = {"benchmark": "x", "em": 0.5, "low": 0.4, "high": 0.6, "n": 9}
        (chart,) = scores_chart("s", "S", [row | {"model": name} for name in names], "benchmark", "model")
        return int(chart.spec["encoding"]["color"]["legend"]["columns"])

    assert columns("a", "b") > 4 > columns("answers that are numbers", "b") == 2 > columns("b" * 60) == 1


def test_a_stage_of_the_loop_links_to_its_page(tmp_path):
    folder = loop_run(tmp_path)
    write_report(tmp_path / "challenger_iter1")
    links = [link for link in page_of(folder).links if link.startswith("../")]
    assert links == ["../challenger_iter1/report.html"]


def test_a_run_that_ends_or_fails_writes_its_page_and_a_refused_one_does_not(small: Path) -> None:
    page = small / "report.html"
    ends: list[tuple[BaseException | None, bool]] = [
        (UserError("no"), False),
        (RunFailed("the trainer died"), True),
        (DataError("no pair was accepted"), True),
        (None, True),
    ]
    for error, writes in ends:
        with pytest.raises(type(error)) if error else nullcontext(), reported(small):
            if error:
                raise error
        assert page.exists() == writes
        page.unlink(missing_ok=True)


def leave_a_run(config: DictConfig) -> None:
    """Leave a stage's files."""
    challenger_run(Path(config.run.dir), steps=1, rows=1)


def test_the_command_of_every_stage_writes_the_page_of_its_run(tmp_path: Path) -> None:
    training = {"challenger", "solver", "train", "demo", "smoke"}
    stages = {*training, "preview", "warm-start", "synthesize", "merge", "evaluate"}
    assert {name for name, command in COMMANDS.items() if command.reports} == stages
    command = replace(COMMANDS["evaluate"], function=f"{__name__}:leave_a_run")
    command(["iteration=0", "model=demo-policy", "hardware=cpu", f"paths.checkpoints={tmp_path}"])
    assert (tmp_path / "evaluate_iter0" / "report.html").is_file()


def test_a_page_that_cannot_be_made_does_not_fail_the_run(small: Path, capsys: Printed) -> None:
    (small / "report.html").mkdir()  # where the page is to go
    with reported(small):
        pass
    assert f"`drzero report {small}` tries again" in capsys.readouterr().out


def test_near_the_stop_time_no_page_is_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "1")
    with reported(small):
        pass
    assert not (small / "report.html").exists()


def test_the_config_as_run_is_headed_by_the_command_and_reads_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/x/drzero", "solver", "run.name=a b\nevil: true\x85evil: true\udcff"])
    config = OmegaConf.create({"run": {"dir": str(tmp_path), "name": "x"}})
    assert OmegaConf.load(write_resolved(config)) == config
    run = RunFolder(tmp_path)
    assert run.command == r"drzero solver 'run.name=a b\nevil: true\x85evil: true\udcff'"
    assert run.versions and "verl 0.9.1" in run.versions


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a live page with a clock that stands still."""
    with live_server(LivePage(folder.resolve(), clock=lambda: 0.0), 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{folder.name}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served(small: Path) -> Iterator[tuple[Path, str]]:
    with serving(small) as url:
        yield small, url


def test_a_live_page_changes_its_version_with_the_runs_files_and_its_end(served: tuple[Path, str]) -> None:
    folder, url = served
    page = Page(httpx.get(url + "/", timeout=60).text)
    assert httpx.get(url + "/version").text == page.data["version"]
    lines(folder / "dumps" / "step_0002.jsonl", [challenger_row(2)])
    changed = httpx.get(url + "/version").text
    assert changed != page.data["version"]
    assert len(Page(httpx.get(url + "/", timeout=60).text).rows) == 2
    with HeldLock(folder / "lock"):
        assert httpx.get(url + "/version").text != changed  # it runs
    assert httpx.get(url + "/version").text == changed  # and was killed, without a trace


def test_a_live_page_serves_the_runs_files_and_nothing_else(served: tuple[Path, str]) -> None:
    folder, url = served
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "secret.json").write_text("{}")
    linked = httpx.get(url + "/dumps/step_0001.jsonl")
    assert linked.status_code == 200 and linked.headers["content-type"].startswith("text/plain")
    for path in (
        "/%00.json",
        f"/{'a' * 5000}.json",
        f"/run/{'a' * 5000}.json",
        "/%2e%2e/other/secret.json",
        "/../other/secret.json",
        "//etc/passwd.json",
    ):
        assert httpx.get(url + path).status_code == 404
    assert httpx.get(url + "/logs/trainer.log").status_code == 404
    assert httpx.get(url + "/", headers={"Host": "evil.example"}).status_code == 403


def test_a_live_page_waits_for_its_run_and_survives_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with serving(folder) as url:
        waiting = httpx.get(url + "/").text
        assert 'http-equiv="refresh"' in waiting and "is no folder: this page waits for it" in waiting
        challenger_run(folder, steps=1, rows=1)
        assert len(Page(httpx.get(url + "/", timeout=60).text).data["rows"]) == 1
        shutil.rmtree(folder)
        assert httpx.get(url + "/version").status_code == 200
        assert "waits for it" in httpx.get(url + "/").text


def test_a_live_page_that_takes_long_is_made_seldom(small: Path) -> None:
    seconds = iter([0.0, 0.0, 10.0, 99.0, 99.0, 101.0, 101.0, 101.0, 101.0])
    live = LivePage(small, clock=lambda: next(seconds))
    page = live.html()  # from 0 to 10
    lines(small / "dumps" / "step_0002.jsonl", [challenger_row(2)])
    assert live.version() == Page(page.decode()).data["version"] and live.html() == page
    assert live.version() != Page(page.decode()).data["version"] and live.html() != page


def test_a_port_in_use_is_refused(served: tuple[Path, str], capsys: Printed) -> None:
    folder, url = served
    port = str(httpx.URL(url).port)
    assert main(["report", str(folder), "--watch", "--port", port]) == 2
    assert "Address already in use: leave it out" in capsys.readouterr().err


def test_the_log_for_inspect_has_every_trajectory_with_messages_scores_and_errors(tmp_path: Path) -> None:
    folder = challenger_run(tmp_path / "run", steps=2, rows=3)
    rows = [challenger_row(2, k=None), challenger_row(2, 1, answer="\ud800")]
    lines(folder / "dumps" / "step_0002.jsonl", rows)
    log = json.loads(write_log(RunFolder(folder)).read_text(encoding="utf-8"))
    assert (log["version"], log["status"]) == (2, "success")
    assert log["eval"]["created"] == "2023-11-14T22:13:20+00:00" and STARTED == 1_700_000_000
    assert log["stats"]["completed_at"] == "2023-11-14T22:18:21+00:00"  # 301 seconds later
    assert len(log["samples"]) == log["results"]["total_samples"] == 5
    first = log["samples"][0]
    assert [message["role"] for message in first["messages"]] == ["assistant", "tool", "assistant"]
    assert first["messages"][0]["content"][0] == {"type": "reasoning", "reasoning": "I will ask."}
    assert first["input"] == DOCUMENT and set(first["scores"]) >= {"reward", "difficulty", "tool"}
    assert "scores" not in log["samples"][3] and "fewer than 5" in log["samples"][3]["error"]["message"]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ('{"evaluate_iter0": {"state": "complete"}, "solver_iter1": "failed"}', "1 stages of manifest.json"),
        ('{"evaluate_iter0": {"state": "complete", "seconds": "long"}}', "1 stages of manifest.json"),
        ('{"evaluate_iterx": {"state": "complete"}}', "evaluate"),
        ("[1, 2]", "1 stages of manifest.json"),
    ],
)
def test_a_damaged_entry_of_a_loops_manifest_costs_itself(tmp_path: Path, stages: str, told: str) -> None:
    manifest = loop_run(tmp_path) / "manifest.json"
    manifest.write_text(f'{{"stages": {stages}}}')
    assert told in page_of(manifest.parent).text
    assert RunFolder(manifest.parent).ending.sentence
