"""The tables of `bench.learning`, over made-up loops whose figures are known."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from scored_answers import evaluated

from bench.learning import main

QUESTIONS = 20


def loop(folder: Path, right: Sequence[int], searched: Mapping[int, Sequence[float]]) -> Path:
    """A loop whose evaluations gave so many right answers, and whose challengers' steps searched so often."""
    (folder / "evolve").mkdir(parents=True)
    for iteration, count in enumerate(right):
        run = evaluated(folder / f"evaluate_iter{iteration}", [1] * count + [0] * (QUESTIONS - count))
        (run / "result.json").touch()
    before = 0
    for iteration, shares in searched.items():
        trained(folder / f"challenger_iter{iteration}", dict(enumerate(shares, before + 1)), "challenger")
        trained(folder / f"solver_iter{iteration}", {1: 0.1 * iteration, 2: 0.2 * iteration}, "solver")
        before += len(shares)
    return folder


def trained(folder: Path, values: Mapping[int, float], stage: str) -> Path:
    """A training run with one metric."""
    (folder / "metrics").mkdir(parents=True)
    name = {"challenger": "rollout/searched_share_multi_hop", "solver": "reward/em"}[stage]
    mark = {"drzero/questions/valid_share": 1.0} if stage == "challenger" else {}
    lines = (
        json.dumps({"step": step, "data": {"training/global_step": step, f"drzero/{name}": value, **mark}})
        for step, value in values.items()
    )
    (folder / "metrics" / "attempt_001.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def rows(shown: str) -> list[list[str]]:
    """The cells of every line of the printed tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if line]


def test_arms_are_summed_up_over_their_seeds_and_compared_with_the_first(tmp_path, capsys):
    for seed, right in enumerate(([2, 6], [2, 8], [2, 7, 9]), start=1):  # the third is one iteration ahead
        loop(tmp_path / "plain" / f"seed{seed}", right, {1: [0.75, 0.25 * seed]})
    for seed, right in ((1, [2, 9]), (3, [2, 12]), (4, [2])):  # the last has evaluated the base alone
        loop(tmp_path / "more" / f"seed{seed}", right, {1: [0.5, 0.5]})
    main([str(tmp_path / "plain"), f"longer={tmp_path / 'more'}", "--out", str(tmp_path / "curves.png")])
    shown = rows(capsys.readouterr().out)
    gain = next(row for row in shown if row[0] == "plain")
    assert gain[:8] == ["plain", "demo_2hop", "20", "1", "0.100", "0.350", "3", "+0.250"]
    assert gain[-1] == ".30 (4, 0), .40 (6, 0), .35 (5, 0)"
    # Both arms have seeds 1 and 3: 9 − 6 and 12 − 7 of 20.
    difference = next(row for row in shown if row[0] == "longer − plain")
    assert difference[1:5] == ["demo_2hop", "1", "2", "+0.200"]
    curve = next(row for row in shown if row[:2] == ["plain", "challenger: share of ≥ 2 hops that search"])
    assert curve[2:5] == ["0.750", "0.500", "-0.250"] and "0.75 → 0.25" in curve[-1]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_loops_steps_count_through_its_iterations(tmp_path, capsys):
    main([str(loop(tmp_path / "one", [1, 1, 1], {1: [0.2, 0.4], 2: [0.6, 0.9]}))])
    shown = rows(capsys.readouterr().out)
    ends = {row[1]: row[2:4] for row in shown if row[:1] == ["one"] and "step" not in row[1]}
    assert ends["challenger: share of ≥ 2 hops that search"] == ["0.200", "0.900"]
    assert ends["solver: exact match on its own questions"] == ["0.100", "0.400"]


def test_training_runs_alone_are_seeds_too(tmp_path, capsys):
    runs = [trained(tmp_path / str(i), {1: 0.5, 4: last}, "challenger") for i, last in enumerate((0.5, 1.0))]
    main([f"train={runs[0]},{runs[1]}"])
    (row,) = (row for row in rows(capsys.readouterr().out) if row[0] == "train")
    assert row[2:5] == ["0.500", "0.750", "+0.250"] and row[-1] == "0.50 → 0.50, 0.50 → 1.00"


def test_two_loops_without_seeds_are_compared(tmp_path, capsys):
    arms = [loop(tmp_path / name, [2, right], {}) for name, right in (("plain", 4), ("more", 9))]
    main([str(arm) for arm in arms])
    difference = next(row for row in rows(capsys.readouterr().out) if row[0] == "more − plain")
    assert difference[1:5] == ["demo_2hop", "1", "1", "+0.250"]


def test_arms_of_one_name_are_not_taken_for_one(tmp_path):
    arms = [loop(tmp_path / place / "checkpoints", [2, 4], {}) for place in ("plain", "more")]
    with pytest.raises(SystemExit, match=f"two arms are called checkpoints: .* OTHER={arms[1]}"):
        main([str(arm) for arm in arms])


def test_a_seed_that_has_only_begun_is_left_out(tmp_path, capsys):
    loop(tmp_path / "arm" / "seed1", [2, 6], {})
    (tmp_path / "arm" / "seed2" / "evolve").mkdir(parents=True)
    main([str(tmp_path / "arm")])
    gain = next(row for row in rows(capsys.readouterr().out) if row[0] == "arm" and row[1] == "demo_2hop")
    assert gain[6:8] == ["1", "+0.200"]


@pytest.mark.parametrize("begun", [(), ("seed1",)], ids=["something else", "only begun"])
def test_a_folder_without_anything_to_show_is_named(tmp_path, begun):
    for seed in begun:
        (tmp_path / seed / "evolve").mkdir(parents=True)
    with pytest.raises(SystemExit, match=f"{tmp_path} holds neither"):
        main([str(tmp_path)])
