"""The whole loop on tiny models: cut off in the middle, rerun, and then asked for things it must refuse.

The first tier uses `launched_loop`, which a container's preemption has cut off, and reruns it. The second
kills its own loop in three stages (`chaos.py` checks it), and redoes one. `make chaos` has all six points of
every stage.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos import STEPS, Kill, Loop, attack, small_loop
from documented import left_by_a_run
from launched_loop import CUT

from drzero.cli import main
from drzero.loop import plan
from drzero.loop.evolve import _run_stage, run_evolve
from drzero.loop.manifest import Manifest
from drzero.loop.plan import compose_loop, plan_loop
from drzero.ops.errors import OutOfTime
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.recipe.compose import compose_stage

pytestmark = pytest.mark.timeout(3600)
KILLS = [
    Kill("challenger", "while step 2 is saved", "supervisor"),
    Kill("solver", "in the update of step 2", "tree"),
    Kill("evaluate", "at 60% of the answers", "tree"),
]
"""Synthesize and merge are killed by their own tests, and `launched_loop` is preempted in synthesize."""
STAGES = ("evaluate_iter0", *(f"{stage}_iter1" for stage in plan.STAGES))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, prepared, speaking_model):
    """A loop that has been killed at every point of KILLS and has then finished."""
    checkpoints = tmp_path_factory.mktemp("evolve") / "loop"
    arguments = small_loop(prepared.corpus, speaking_model, checkpoints)
    loop = Loop(arguments, checkpoints)
    recoveries, problems = attack(loop, KILLS)
    return SimpleNamespace(loop=loop, arguments=arguments, recoveries=recoveries, problems=problems)


def entries_of(loop):
    return Manifest(loop.checkpoints / "evolve" / "manifest.json").entries


@pytest.mark.matrix
@pytest.mark.slow(
    "a second witness of what `launched_loop` shows of one stage, and further starts of the trainer"
)
class TestKilledInThreeStages:
    def test_a_loop_killed_in_its_stages_recovers_without_a_trace(self, attacked):
        assert attacked.problems == [], attacked.loop.output.read_text()[-6000:]

    def test_the_kills_struck_where_they_were_meant_to(self, attacked):
        assert [recovery.struck for recovery in attacked.recoveries] == [True] * len(KILLS)

    def test_only_the_killed_stages_were_started_twice(self, attacked):
        started_again = {name for name, entry in entries_of(attacked.loop).items() if entry.starts > 1}
        assert started_again == {f"{kill.stage}_iter1" for kill in KILLS}


def test_the_manifest_accounts_for_every_stage(launched_loop):
    entries = Manifest(launched_loop.mounted / "evolve" / "manifest.json").entries
    assert tuple(entries) == STAGES
    assert {name for name, entry in entries.items() if entry.starts > 1} == {CUT}
    for entry in entries.values():
        assert entry.seconds > 0 and "verl" in entry.versions and entry.inputs
        assert all(Path(output["path"]).exists() for output in entry.outputs.values())
    assert all(entries[name].tokens > 0 for name in STAGES if not name.startswith("merge"))


def test_the_docs_describe_every_file_it_leaves(launched_loop):
    folder, described = launched_loop.mounted, left_by_a_run()
    left = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    left = [path if path.startswith("launches/") else f"outputs/checkpoints/{path}" for path in left]
    assert len(left) > 50
    assert [path for path in left if not any(shown.fullmatch(path) for shown in described)] == []


def test_the_loop_ends_with_the_scores_of_base_and_iteration(launched_loop):
    shown = launched_loop.done.stdout.rpartition("exact match, 95 % interval")[2]
    assert "base" in shown and "iteration 1" in shown
    assert all(f"demo_{hop}hop" in shown for hop in (1, 2, 3, 4))
    report = json.loads((launched_loop.mounted / "evolve" / "report.json").read_text())
    assert [(change["earlier"], change["later"]) for change in report["changes"]] == [(0, 1)] * 5
    scores = [report["scores"][iteration]["demo_1hop"] for iteration in ("0", "1")]
    assert report["changes"][0]["effect"] == pytest.approx(scores[1]["em"] - scores[0]["em"])


def test_the_solver_was_trained_on_the_synthesized_rows(launched_loop):
    dump = (launched_loop.mounted / "solver_iter1" / "dumps" / f"step_{STEPS:04d}.jsonl").read_text()
    assert {json.loads(line)["reward"]["answer"] for line in dump.splitlines()} & {"Vell", "nobody"}
    assert all(json.loads(line)["targets"] for line in dump.splitlines())


def test_a_finished_loop_does_nothing_when_run_again(launched_loop, capfd):
    manifest = launched_loop.mounted / "evolve" / "manifest.json"
    before = Manifest(manifest).entries
    assert main(["evolve", *launched_loop.arguments]) == 0
    assert "[evolve]" not in capfd.readouterr().out
    assert Manifest(manifest).entries == before


def test_status_shows_the_loop_as_a_table(launched_loop, capfd):
    places = ("hardware=", "model=", "base_model=", "paths.")
    assert main(["status", *(word for word in launched_loop.arguments if word.startswith(places))]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in STAGES) and shown.count("complete") == len(STAGES)


@pytest.mark.slow("an evaluation once more; test_loop_state.py counts what would be done again")
def test_from_redoes_a_stage(attacked):
    folder = attacked.loop.checkpoints / "evaluate_iter1"
    before = (folder / "answers.jsonl").stat().st_mtime_ns
    assert main(["evolve", "--from", "evaluate_iter1", *attacked.arguments]) == 0
    assert (folder / "answers.jsonl").stat().st_mtime_ns > before
    assert entries_of(attacked.loop)["evaluate_iter1"].starts == 1


def test_a_stage_out_of_time_ends_the_loop_with_its_message(prepared, speaking_model, tmp_path, monkeypatch):
    first = plan_loop(compose_loop(small_loop(prepared.corpus, speaking_model, tmp_path / "loop")))[0]
    manifest = Manifest(tmp_path / "loop" / "evolve" / "manifest.json")
    # Less than an evaluation starts its services for.
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 55))
    with pytest.raises(OutOfTime, match=r"^evaluate_iter0(: evaluate)? was not started: the stop time"):
        _run_stage(first, compose_stage(first.stage, first.overrides), manifest, manifest.path.parent)
    entry = Manifest(manifest.path).entry("evaluate_iter0")
    assert (entry.state, entry.starts) == ("failed", 1)
    assert entry.error and entry.error.endswith("rerun with more time to resume")


def test_a_loop_begins_no_stage_after_its_stop_time(prepared, speaking_model, tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() - 1))
    with pytest.raises(OutOfTime, match=r"^evaluate_iter0 was not started: the stop time"):
        run_evolve(small_loop(prepared.corpus, speaking_model, tmp_path / "loop"))
    assert not list((tmp_path / "loop").glob("evaluate_iter0/*"))
    assert Manifest(tmp_path / "loop" / "evolve" / "manifest.json").entry("evaluate_iter0").starts == 0
