"""A run's report in headless Chromium: drawn, usable, quiet, and without a request.

make compat      # DRZERO_COMPAT=1; needs `chromium` on the path (Debian: apt-get install chromium)

DRZERO_REPORT_RUN=outputs/checkpoints/demo adds the folder of a real run.
"""

import os
import subprocess
from pathlib import Path

import pytest
from made_run import challenger_row, challenger_run, event, lines, loop_run
from other_environment import PLAYWRIGHT, driven, environment, only_by_make_compat

from drzero.runs.report.write import write_report

only_by_make_compat("needs Chromium and an environment with playwright", browser=True)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e \ud83d <!-- {{7*7}}"
MANY = 10_000


def runs(folder):
    """A finished run, a killed one with failures, a failed loop, a hostile and an empty run, a long one."""
    hostile = challenger_run(folder / "hostile", steps=1, rows=1)
    rows = [challenger_row(1, n, question=f"{HOSTILE} {n}?", answer=f"{HOSTILE} indeed") for n in range(3)]
    lines(hostile / "dumps" / "step_0001.jsonl", rows)
    lines(hostile / "logs" / "events.jsonl", [event(150, "restart", HOSTILE, HOSTILE)])
    empty = folder / "empty"
    empty.mkdir()
    (empty / "resolved.yaml").write_text("method: hrpo\n")
    killed = challenger_run(folder / "killed")
    lines(killed / "logs" / "events.jsonl", [event(21, "start", "trainer", "starting", offset=0)])
    (killed / "result.json").unlink()
    failed = [challenger_row(2, 0, k=None), challenger_row(2, 1, answer="Who"), challenger_row(2, 2)]
    lines(killed / "dumps" / "step_0002.jsonl", failed)
    made = {
        "finished": challenger_run(folder / "finished"),
        "killed": killed,
        "loop": loop_run(folder / "loop"),
        "hostile": hostile,
        "empty": empty,
        "many": challenger_run(folder / "many", steps=40, rows=MANY // 40),
    }
    real = os.environ.get("DRZERO_REPORT_RUN")
    return made | ({"real": Path(real).resolve()} if real else {})


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return environment(tmp_path_factory, PLAYWRIGHT)


@pytest.fixture(scope="module")
def seen(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages = {name: str(write_report(run)) for name, run in runs(folder).items()}
    found = driven(python, "drive_page.py", str(folder), *pages.values())
    return {name: found[path] for name, path in pages.items()}


def test_every_chart_is_drawn_also_under_the_pages_own_policy(seen):
    assert seen["finished"]["charts"] >= 10 and seen["loop"]["charts"] == 1 and seen["empty"]["charts"] == 0
    for page in seen.values():
        assert page["drawn"] == page["charts"] == page["drawn under the policy"] + page["folded"]


def test_a_question_that_changed_opens_as_it_was_before_and_after(seen):
    opened = [where.rpartition(",")[0] for where in seen["loop"]["changed"]]
    files = [f"../evaluate_iter{number}/answers.jsonl, line" for number in (0, 1)]
    assert opened == [f"{file} {line}" for line in (3, 4) for file in files]  # won, then lost


def test_a_training_page_answers_on_its_first_screen_and_its_links_and_button_work(seen):
    for name in ("finished", "killed", "hostile", "many"):
        first = seen[name]["first"]
        assert first["on the first screen"] == [True] * 4
        assert first["asked"][:20] and first["opened"].startswith(first["asked"][:20])
        assert first["copied"] == first["command"].strip() and first["about opens"]
        assert dict(first["folds open"])["h-checks"]  # each has an alarm, or was killed
    assert seen["loop"]["first"] is None


def test_no_page_says_anything_on_the_console_or_asks_for_anything(seen):
    for page in seen.values():
        assert page["messages"] == []
        assert len(page["requests"]) == 1  # the file itself


def test_the_table_filters_sorts_and_opens_by_keyboard(seen):
    table = seen["finished"]["table"]
    assert table["all"] == 12 and table["of two hops"] == 3 and table["hops shown"] == ["2"]
    scores = [float(score) for score in table["scores"] if score]
    assert scores == sorted(scores, reverse=True)
    assert seen["killed"]["table"]["scores"].count("") == 1  # of the row that a failed service spoiled
    assert "dumps/step_" in table["first"] and table["first"] != table["second"]


def test_text_is_found_in_any_turn_of_any_of_ten_thousand(seen):
    table = seen["many"]["table"]
    assert table["all"] == table["with text"] == MANY
    assert 0 < table["of two hops"] < MANY


def test_columns_that_no_listed_row_fills_are_left_out(seen):
    columns = seen["loop"]["table"]["columns of evaluations"]
    assert "f1" in columns and "difficulty" not in columns


def test_every_page_can_be_read_on_a_phone(seen):
    for page in seen.values():
        assert page["width on a phone"] == 390
        assert page["cut off on a phone"] == []
        assert page["narrowest on a phone"] is None or page["narrowest on a phone"] > 30


def test_the_docs_pictures_are_made_of_a_run_folder(python, tmp_path):
    run = challenger_run(tmp_path / "run")
    write_report(run)
    script = Path(__file__).parents[2] / "bench" / "report_pictures.py"
    subprocess.run([str(python), str(script), str(run), str(tmp_path)], check=True, timeout=200)
    for name in ("report-curves.png", "report-trajectory.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
