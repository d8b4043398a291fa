"""The loop through the launcher, for real: every stage in Modal's container, one preempted in the middle.

`launched_loop` is `evolve` as one launch, whose container is preempted while samples are drawn. The stages by
themselves are in `test_modal_runs.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chaos import Loop, problems
from launched_loop import CUT, LaunchedLoop
from modal_checkout import PLANTED, run_action
from stage_run import RUN_LIMIT_S

from drzero.runs.report.write import write_report

pytestmark = pytest.mark.timeout(4 * RUN_LIMIT_S)

SOLVER = "solver_iter1"


def manifest(loop: LaunchedLoop) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((loop.committed / "evolve" / "manifest.json").read_text())["stages"]
    return stages


class TestUpload:
    def test_puts_things_where_the_stages_read_them(self, launched_loop):
        volume = launched_loop.plane.volume("dr-zero-corpus").committed()
        assert (volume / "corpus.jsonl").is_file()
        assert (volume / "models" / "tiny" / "config.json").is_file()

    def test_a_second_time_sends_nothing(self, launched_loop):
        assert " 0 files sent" in launched_loop.uploads[2].stdout


class TestEvolve:
    def test_the_loop_is_finished_in_spite_of_a_preemption(self, launched_loop):
        done = launched_loop.done
        done.succeeded()
        assert "evolve is finished" in done.stdout
        assert launched_loop.call.attempts == 2

    def test_only_the_stage_that_was_cut_was_started_twice(self, launched_loop):
        starts = {name: entry["starts"] for name, entry in manifest(launched_loop).items()}
        assert starts.pop(CUT) == 2
        assert set(starts.values()) == {1} and len(starts) == 5

    def test_nothing_was_drawn_twice_or_left_half_written(self, launched_loop):
        assert problems(Loop([], launched_loop.committed), []) == []

    def test_scores_of_base_and_iteration_are_shown_here(self, launched_loop):
        shown = launched_loop.done.stdout.rpartition("exact match, 95 % interval")[2]
        assert "base" in shown and "iteration 1" in shown

    def test_both_containers_are_paid_for(self, launched_loop):
        paid = json.loads((launched_loop.committed / "launches" / "evolve" / "spend.json").read_text())
        assert [call["part"] for call in paid] == [0, 0]
        assert paid[0]["until"] <= paid[1]["began"]


class TestAfterwards:
    def test_status_has_the_state_of_the_launch(self, launched_loop):
        done = run_action(launched_loop.plane, launched_loop.checkout, "status").succeeded()
        (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["evolve"]]
        assert "finished" in line

    def test_logs_show_the_console_of_both_attempts(self, launched_loop):
        done = run_action(
            launched_loop.plane, launched_loop.checkout, "logs", "--stage", "evolve"
        ).succeeded()
        assert "[retrieval] ready after" in done.stdout
        # A line a step and what happened; the output of veRL and Ray is in the trainer's log.
        assert re.search(r"\[trainer\] step 2/2: reward \d", done.stdout)
        assert "[trainer] checkpoint of step 2: " in done.stdout and "TaskRunner" not in done.stdout

    def test_download_brings_dumps_and_a_second_time_nothing(self, launched_loop, tmp_path):
        words = ["download", f"{SOLVER}/dumps", str(tmp_path / "dumps")]
        first, second = (run_action(launched_loop.plane, launched_loop.checkout, *words) for _ in range(2))
        first.succeeded()
        assert (tmp_path / "dumps" / "step_0001.jsonl").is_file()
        assert " 0 files fetched" in second.stdout

    def test_every_stage_and_the_loop_have_left_a_page_with_what_they_did(self, launched_loop):
        pages = {
            name: (launched_loop.committed / name / "report.html").read_text(encoding="utf-8")
            for name in (*manifest(launched_loop), "evolve")
        }
        shown = {"merge": "<h1>", "synthesize": 'id="rows"'}
        assert all(shown.get(name.split("_")[0], 'id="chart-') in page for name, page in pages.items())
        assert all(f"../{name}/report.html" in pages["evolve"] for name in manifest(launched_loop))
        assert not any(">running</span>" in page for page in pages.values())
        assert "cli.py" not in pages[SOLVER] and "<code>drzero solver " in pages[SOLVER]
        assert "<code>drzero evolve " in pages["evolve"]

    def test_a_page_made_after_a_download_is_the_one_that_the_stage_made(self, launched_loop, tmp_path):
        name = "evaluate_iter1"
        words = ["download", name, str(tmp_path / name)]
        run_action(launched_loop.plane, launched_loop.checkout, *words).succeeded()
        made = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        again = write_report(tmp_path / name).read_text(encoding="utf-8")
        # The bundle of Vega is not the same in every process.
        made, again = (
            re.sub(r"<script>.*?</script>|sha256-[\w+/=]+", "", page, flags=re.DOTALL)
            for page in (made, again)
        )
        assert again == made.replace(str(launched_loop.mounted / name), str(tmp_path / name))

    def test_no_planted_secret_is_in_any_log_config_dump_or_process_title(self, launched_loop):
        assert any("planted" in value for value in PLANTED.values())
        plane, done = launched_loop.plane, launched_loop.done
        texts = launched_loop.seen | {done.stdout, done.stderr} | {app.log.text() for app in plane.apps}
        for value in PLANTED.values():
            assert not [text[:200] for text in texts if value in text]
            for name in ("dr-zero-checkpoints", "dr-zero-corpus", "dr-zero-cache"):
                assert not files_with(plane.volume(name).committed(), value.encode())

    def test_no_request_has_left_the_machine(self, launched_loop):
        # Ray asks whether it is on a cloud's machine, by addresses that end on the machine's own link.
        assert set(launched_loop.plane.left_machine) <= {"169.254.169.254", "metadata.google.internal"}


def files_with(folder: Path, value: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and value in path.read_bytes()]
