"""Loops of several training seeds: their overrides, their failures, and what they share."""

import re
import time
from pathlib import Path

import pytest
from scored_answers import evaluated

from drzero.cli import main
from drzero.loop.manifest import Manifest
from drzero.loop.plan import compose_loop, plan_loop
from drzero.loop.report import print_loop, read_answers
from drzero.loop.seeds import SeedsFailed, run_seeds, seed_overrides, split_seeds
from drzero.ops.errors import OutOfTime, RunFailed
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import append_json_lines
from drzero.recipe.compose import compose_stage
from drzero.recipe.errors import CheckError


@pytest.mark.parametrize("words", [["--seeds", "3"], ["--seeds=3"]])
def test_the_number_of_seeds_is_an_option_anywhere_among_the_overrides(words):
    assert split_seeds(["loop=demo", *words, "iterations=1"]) == (3, ["loop=demo", "iterations=1"])
    without = ["loop=demo", "--from", "solver_iter1"]
    assert split_seeds(without) == (None, without)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds"], "at least 1"),
        (["--seeds", "0"], "at least 1"),
        (["--seeds=three"], "--seeds three"),
        (["--seeds", "2", "--from", "solver_iter1"], "without --seeds"),
    ],
)
def test_a_wrong_number_of_seeds_is_refused_before_anything_starts(arguments, said, capsys):
    with pytest.raises(CheckError, match=said):
        split_seeds(arguments)
    assert main(["evolve", *arguments]) == 2
    assert capsys.readouterr().err.startswith("drzero evolve: --")


def test_a_seed_changes_training_and_not_the_evaluation(tmp_path):
    place = tmp_path / "it's, a place"
    typed = ["hardware=cpu", "iterations=1", f"paths.checkpoints={tmp_path}", *seed_overrides(place, 7)]
    plan = plan_loop(compose_loop(typed))
    trained = {run.stage for run in plan if "data.seed=7" in run.overrides}
    assert trained == {"challenger", "synthesize", "solver"}
    sampled = {run.stage for run in plan if "actor_rollout_ref.rollout.seed=7" in run.overrides}
    assert sampled == {"challenger", "solver"}
    config = compose_stage(plan[0].stage, plan[0].overrides)
    assert Path(config.run.dir) == place / "evaluate_iter0"


def loops(started, *outcomes):
    """Runs a seed's loop: it fails, or gives so many right answers in its last iteration."""

    def run(overrides):
        (place,) = (re.sub(r'^paths.checkpoints="|"$', "", o) for o in overrides if o.endswith('"'))
        seed = int(place.rpartition("seed")[2])
        started.append(seed)
        outcome = outcomes[seed - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        for iteration, right in enumerate((0, 0, outcome)):
            folder = Path(place) / f"evaluate_iter{iteration}"
            evaluated(folder, [1] * right + [0] * (20 - right))
            (folder / "result.json").touch()

    return run


def test_the_loops_of_all_seeds_are_run_and_summed_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    started = []
    run_seeds(3, ["hardware=cpu", f"paths.checkpoints={tmp_path}"], loops(started, 6, 9, 12))
    assert started == [1, 2, 3]
    shown = capsys.readouterr().out
    assert "change of exact match over 3 seeds" in shown
    (line,) = [line for line in shown.splitlines() if line.split()[:1] == ["demo_2hop"]]
    assert line.split()[:5] == ["demo_2hop", "20", "0.000", "0.450", "+0.450"]
    # The base model was asked once for all seeds.
    answers = [read_answers(tmp_path / f"seed{seed}") for seed in (1, 2, 3)]
    assert [list(of_seed) for of_seed in answers] == [[0, 1, 2]] * 3
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert ".30 (6, 0), .45 (9, 0), .60 (12, 0)" in line


def test_the_other_seeds_run_after_a_failed_one_which_is_named_in_the_end(tmp_path, capsys):
    started = []
    with pytest.raises(SeedsFailed, match=r"1 of 3 seeds failed\. seed 2: no luck\. Rerun"):
        run_seeds(3, [f"paths.checkpoints={tmp_path}"], loops(started, 6, RunFailed("no luck\nat all"), 9))
    assert started == [1, 2, 3]
    assert "change of exact match over 2 seeds" in capsys.readouterr().out
    run_seeds(3, [f"paths.checkpoints={tmp_path}"], loops(started, 6, 8, 9))
    assert started == [1, 2, 3, 1, 2, 3]
    assert "change of exact match over 3 seeds" in capsys.readouterr().out


def test_half_written_answers_of_the_base_model_are_not_shared(tmp_path):
    killed = evaluated(tmp_path / "seed1" / "evaluate_iter0", [1] * 20) / "answers.jsonl"
    killed.write_bytes(killed.read_bytes() + '{"key": "demo_2hop/é'.encode()[:-1])
    started = []
    with pytest.raises(SeedsFailed, match="seed 1: killed"):
        run_seeds(2, [f"paths.checkpoints={tmp_path}"], loops(started, RunFailed("killed"), 9))
    answers = read_answers(tmp_path / "seed2")
    assert started == [1, 2] and sum(record["right"] for record in answers[0] if "2hop" in record["key"]) == 0


def test_a_seed_that_runs_out_of_time_ends_all(tmp_path):
    started = []
    with pytest.raises(OutOfTime):
        run_seeds(3, [f"paths.checkpoints={tmp_path}"], loops(started, 6, OutOfTime("it is late"), 9))
    assert started == [1, 2]


def test_status_shows_the_loops_of_all_seeds(tmp_path, capsys):
    assert main(["status", f"paths.checkpoints={tmp_path}"]) == 2
    for seed in (1, 2):
        (tmp_path / f"seed{seed}" / "evolve").mkdir(parents=True)
        Manifest(tmp_path / f"seed{seed}" / "evolve" / "manifest.json").begin(f"solver_iter{seed}", {}, {})
    assert main(["status", f"paths.checkpoints={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert all(f"loop, seed{seed}" in shown and f"solver_iter{seed}" in shown for seed in (1, 2))


@pytest.mark.parametrize("has_loop", [False, True])
def test_status_names_a_run_that_lives_outside_a_loop(tmp_path, capsys, has_loop):
    if has_loop:
        (tmp_path / "evolve").mkdir()
        Manifest(tmp_path / "evolve" / "manifest.json").begin("solver_iter1", {}, {})
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / "lock").touch()
    with HeldLock(tmp_path / "preview" / "lock"):
        assert main(["status", f"paths.checkpoints={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert f"preview runs: `drzero top {tmp_path / 'preview'}` shows it" in shown
    assert "ended runs" not in shown and ("solver_iter1" in shown) == has_loop
    # While it starts, it names each part of its start.
    run, events = tmp_path / "preview", EventLog(tmp_path / "preview" / "logs" / "events.jsonl")
    events.add("start", "trainer", "starting")
    events.add("startup", "trainer", "captures CUDA graphs")
    for beats, said in ((), "starts (captures CUDA graphs)"), ([{"step": 1, "phase": "rollout"}], "runs"):
        append_json_lines(run / "heartbeats.jsonl", *({"time": time.time()} | beat for beat in beats))
        with HeldLock(run / "lock"):
            assert main(["status", f"paths.checkpoints={tmp_path}"]) == 0
        assert f"preview {said}: `drzero top {run}` shows it" in capsys.readouterr().out
    # Without it, there is nothing to show but the loop.
    assert main(["status", f"paths.checkpoints={tmp_path}"]) == (0 if has_loop else 2)
    shown, refused = capsys.readouterr()
    assert "preview runs" not in shown
    assert (f"of its last run `drzero diagnose {tmp_path / 'preview'}` tells" in refused) == (not has_loop)


def test_status_shows_a_stage_whose_results_are_being_removed_as_to_redo(tmp_path, capsys):
    manifest = Manifest(tmp_path / "manifest.json")
    manifest.entry("solver_iter1").state = "forgotten"
    print_loop(manifest, ["solver_iter1"], running=False)
    assert "to redo" in capsys.readouterr().out
