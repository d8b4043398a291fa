"""What a kill leaves of a run's checkpoints, moment by moment, and what a rerun then resumes from."""

import json
from pathlib import Path

import pytest

from verl_ext.checkpoints import (
    TRACKER,
    is_whole,
    prune_checkpoints,
    saved_step,
    settle_checkpoints,
    step_folder,
)

RANKS = 2
# The files of one save in the order in which veRL writes them.
FILES = [
    *(f"actor/{kind}_world_size_2_rank_{rank}.pt" for rank in range(RANKS) for kind in ("model", "optim")),
    "actor/huggingface/config.json",
    "actor/fsdp_config.json",
    "data.pt",
]


def save(run: Path, step: int, files: int = len(FILES), tracker: str | None = None) -> None:
    """A save that was killed after `files` files; `tracker` is what it then wrote as the recorded number."""
    for name in FILES[:files]:
        path = step_folder(run, step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"world_size": RANKS}))
    if tracker is not None:
        (run / TRACKER).write_text(tracker)


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))


@pytest.mark.parametrize("files", range(len(FILES) + 1))
def test_a_save_that_was_killed_is_removed_and_the_recorded_step_stays(tmp_path: Path, files: int) -> None:
    save(tmp_path, 3, tracker="3")
    save(tmp_path, 6, files)
    reported = settle_checkpoints(tmp_path)
    assert (saved_step(tmp_path), steps(tmp_path)) == (3, [3])
    assert len(reported) == (files > 0) and all("global_step_6" in line for line in reported)


@pytest.mark.parametrize("files", range(len(FILES) + 1))
def test_a_first_save_that_was_killed_leaves_a_start_from_scratch(tmp_path: Path, files: int) -> None:
    save(tmp_path, 3, files)
    settle_checkpoints(tmp_path)
    assert (saved_step(tmp_path), steps(tmp_path)) == (0, [])


def test_a_truncated_record_means_the_newest_whole_step_and_is_repaired(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6, tracker="")
    assert saved_step(tmp_path) == 6
    assert "torn" in settle_checkpoints(tmp_path)[0]
    assert (tmp_path / TRACKER).read_text() == "6"


def test_a_truncated_record_without_a_whole_step_means_a_start_from_scratch(tmp_path: Path) -> None:
    save(tmp_path, 3, files=2, tracker="")
    settle_checkpoints(tmp_path)
    assert (saved_step(tmp_path), steps(tmp_path), (tmp_path / TRACKER).exists()) == (0, [], False)


def test_the_rest_of_an_incompletely_pruned_step_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (step_folder(tmp_path, 2)).mkdir()
    (step_folder(tmp_path, 2) / "data.pt").write_text("")
    save(tmp_path, 3, tracker="3")
    settle_checkpoints(tmp_path)
    assert steps(tmp_path) == [1, 3]


def test_an_intact_folder_is_not_changed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3, tracker="3")
    assert settle_checkpoints(tmp_path) == []
    assert steps(tmp_path) == [2, 3]


def test_a_run_that_has_not_begun_needs_nothing(tmp_path: Path) -> None:
    assert settle_checkpoints(tmp_path / "none") == [] and saved_step(tmp_path / "none") == 0


@pytest.mark.parametrize("missing", range(len(FILES)))
def test_a_step_without_weights_or_position_is_not_whole(tmp_path: Path, missing: int) -> None:
    save(tmp_path, 3)
    (step_folder(tmp_path, 3) / FILES[missing]).unlink()
    # The optimizer's shards are not asked for: a run may save without them.
    assert is_whole(step_folder(tmp_path, 3)) == ("optim" in FILES[missing])


@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (4, [2, 4, 6, 8]), (9, [2, 4, 6, 8]), (None, [2, 4, 6, 8])],
)
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, tracker=str(step))
    prune_checkpoints(tmp_path, keep)
    assert steps(tmp_path) == left


def test_pruning_never_removes_the_recorded_step_nor_one_that_is_being_saved(tmp_path: Path) -> None:
    save(tmp_path, 2, tracker="2")
    save(tmp_path, 4)
    prune_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [2, 4]
