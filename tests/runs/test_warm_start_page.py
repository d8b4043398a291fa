"""The page of a warm start, finished, cut off, and among its neighbours."""

import json
import re
import subprocess
import sys

import pytest
from made_run import QUESTION, warm_start_run
from shown_page import page_of

from drzero.cli import main
from drzero.ops.files import write_jsonl
from drzero.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return warm_start_run(tmp_path / "warm_start")


def test_the_page_goes_from_the_result_to_what_it_rests_on(folder):
    page = page_of(folder)
    parts = ["Before and after", "Curves", "Demonstrations", "What was left out"]
    parts += ["Trajectories", "Is it sound?"]
    text = page.text.partition("run ended without an error")[2].partition("Command, versions, paths")[2]
    places = [text.index(part) for part in parts]
    assert places == sorted(places) and "What the corpus gives" not in text
    for row in (
        "n before after",
        "questions that keep the format 2 0.50 0.09 to 0.91 1.00 0.34 to 1.00",
        "right answers 2 0.50 0.09 to 0.91 1.00 0.34 to 1.00",
        "answers given 2 1.00 0.34 to 1.00 1.00 0.34 to 1.00",
        "split role 1 hop 2 hops together",
        "train challenger 3 2 5 train solver 3 2 5 held out challenger 0 1 1 held out solver 0 1 1",
        "hops , warm_start: 4 conversations",
        "balance , warm_start: 1 conversation ",
    ):
        assert row in text, row
    assert re.findall(r"hops: (\d) turns", text) == ["0", "1", "2"]
    assert text.index("hops , warm_start") < text.index("balance , warm_start")


def test_both_losses_are_in_one_chart(folder):
    (chart,) = page_of(folder).data["charts"].values()
    shown = [(row["name"], row["step"], row["mean"]) for row in chart["data"]["values"]]
    assert shown == [("training", 1, 1.0), ("training", 2, 0.5), ("held out", 1, 0.9), ("held out", 2, 0.6)]


def test_of_a_long_training_the_points_are_means_with_a_band_and_those_of_the_held_out_are_not(folder):
    logged = [{"step": step, "data": {"train/loss": 1 / step}} for step in range(1, 301)]
    logged += [{"step": step, "data": {"val/loss": 0.5}} for step in range(60, 301, 60)]
    write_jsonl(folder / "metrics" / "attempt_001.jsonl", logged)
    (chart,) = page_of(folder).data["charts"].values()
    rows = chart["data"]["values"]
    assert {row["name"] for row in rows} == {"training", "held out"}
    assert {row["name"] for row in rows if "low" in row} == {"training"}
    (band,) = (layer["params"][0] for layer in chart["layer"] if "params" in layer)
    assert band["value"] == [{"name": "training"}]


def test_the_checks_conversations_open_those_after_training_first(folder):
    page = page_of(folder)
    names = ("stage", "role", "question", "answer", "score", "failures")
    wrong = [
        ("before", "challenger", None, "Porlal", 0.0, "no question"),
        ("before", "solver", QUESTION, "Porlal", 0.0, ""),
    ]
    right = [(role, QUESTION, "Brurbul Lernin", 1.0, "") for role in ("challenger", "solver")]
    expected = [("after", *row) for row in right * 2] + [("before", *row) for row in right] + wrong
    assert [tuple(row[name] for name in names) for row in page.rows] == expected
    said = page.conversations
    assert "a valid question" in said[0] and "the answer is a target" in said[1]
    assert "the last turn has no &lt;question&gt;" in said[6] and "accepted: Brurbul Lernin" in said[7]


JOURNALS = ("before.jsonl", "after.jsonl", "demonstrations.jsonl", "left_out.jsonl")
OTHERS = ("result.json", "report.json", "metrics/attempt_001.jsonl", "logs/events.jsonl")


@pytest.mark.parametrize("damage", [None, '{"role": 1, "step": []}\n[2]\n{"role": "solver", "hop'])
@pytest.mark.parametrize("name", [*JOURNALS, *OTHERS])
def test_a_damaged_file_reads_as_empty(folder, name, damage):
    path = folder / name
    path.unlink(missing_ok=True)
    if damage:
        path.write_text(damage)
    text = page_of(folder).text
    gone = {
        "demonstrations.jsonl": "None has been chosen.",
        "before.jsonl": "right answers 2 – 1.00 0.34 to 1.00",
        "after.jsonl": "right answers 2 0.50 0.09 to 0.91 –",
    }
    assert gone.get(name, "Before and after") in text
    assert ("What was left out" in text) == (name != "left_out.jsonl")
    assert main(["top", str(folder)]) == main(["diagnose", str(folder)]) == 0


def test_a_check_that_is_not_finished_says_how_many_it_rests_on(folder):
    lines = (folder / "after.jsonl").read_text().splitlines()
    damaged = [*lines[:3], lines[3][:40], '{"role": "challenger", "hop": 2}']
    (folder / "after.jsonl").write_text("\n".join(damaged))
    page = page_of(folder)
    assert "right answers 2, 1 0.50 0.09 to 0.91 1.00 0.21 to 1.00" in page.text
    assert "2 lines hold no trajectory that can be read: after.jsonl:4, after.jsonl:5" in page.text
    for name in ("before", "after"):
        (folder / f"{name}.jsonl").unlink()
    assert "The model has not been checked." in page_of(folder).text


@pytest.mark.parametrize(
    ("config", "has_demonstrations", "kind"),
    [
        ("documents: 20\ndemonstrations: [preview]", False, "warm-start"),
        ("documents: 20\ndemonstrations: []", True, "warm-start"),
        ("documents: 20\ndemonstrations: []", False, "preview"),  # the one that a warm start makes
        ("documents: 20", False, "preview"),
        ("method: hrpo", False, "training"),
        ("", True, "warm-start"),
    ],
)
def test_a_warm_start_is_told_from_its_preview(tmp_path, config, has_demonstrations, kind):
    (tmp_path / "resolved.yaml").write_text(config)
    if has_demonstrations:
        (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"role": "solver"}))
    assert RunFolder(tmp_path).kind == kind


def test_a_page_is_made_without_a_trainer_in_memory():
    code = "import sys, drzero.runs.report.page; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
