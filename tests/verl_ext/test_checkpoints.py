"""Which checkpoints count, where a rerun resumes, and that nothing whole or foreign is removed."""

import os

import pytest
from verl_saves import FILES, save

from verl_ext.checkpoints import (
    TRACKER,
    is_whole,
    prune_checkpoints,
    saved_step,
    saving,
    settle_checkpoints,
    shard_count,
    step_folder,
)


def save_and_die(run, step, files):
    """A save by our trainer that is killed after `files` files."""
    with pytest.raises(InterruptedError), saving(run, step):
        save(run, step, files)
        raise InterruptedError


def steps(run):
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))


def content(run):
    """The contents of all files in a run's folder, whatever their names."""
    return {path.read_bytes() for path in run.rglob("*") if path.is_file()}


def dangling(tracker):
    tracker.symlink_to(tracker.with_name("nowhere"))


def directory(tracker):
    tracker.mkdir()
    (tracker / "notes.txt").write_text("mine")


TRACKERS = {
    "missing": lambda tracker: None,
    "directory": directory,
    "dangling": dangling,
    "pipe": os.mkfifo,
    "bytes": lambda tracker: tracker.write_bytes(b"\xff\xfe6"),
    "digits": lambda tracker: tracker.write_text("9" * 5000),
    **{
        text or "empty": (lambda tracker, text=text: tracker.write_text(text))
        for text in ("0", "", "3", "1", "six", "-6", "6")
    },
}


@pytest.mark.parametrize("damage", TRACKERS.values(), ids=TRACKERS)
def test_no_whole_checkpoint_is_lost_with_any_record(tmp_path, damage):
    save(tmp_path, 3)
    save(tmp_path, 6)
    before = content(tmp_path)
    damage(tmp_path / TRACKER)
    assert saved_step(tmp_path) == 6
    settle_checkpoints(tmp_path)
    assert (saved_step(tmp_path), steps(tmp_path)) == (6, [3, 6])
    assert (tmp_path / TRACKER).read_text() == "6" and before <= content(tmp_path)
    assert settle_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", sorted(TRACKERS.keys() - {"3", "1", "6"}))
def test_a_damaged_record_alone_means_a_start_from_scratch(tmp_path, name):
    TRACKERS[name](tmp_path / TRACKER)
    settle_checkpoints(tmp_path)
    assert saved_step(tmp_path) == 0 and not os.path.lexists(tmp_path / TRACKER)
    assert settle_checkpoints(tmp_path / "none") == [] and saved_step(tmp_path / "none") == 0


@pytest.mark.parametrize("files", range(len(FILES) + 1))
def test_a_killed_save_is_removed_unless_it_was_whole(tmp_path, files):
    save(tmp_path, 3, tracker="3")
    save_and_die(tmp_path, 6, files)
    reported = settle_checkpoints(tmp_path)
    last = 6 if files == len(FILES) else 3
    assert (saved_step(tmp_path), steps(tmp_path)) == (last, [3] if last == 3 else [3, 6])
    assert (tmp_path / TRACKER).read_text() == str(last)
    assert len(reported) == (files > 0) and settle_checkpoints(tmp_path) == []


@pytest.mark.parametrize("files", range(1, len(FILES)))
def test_an_incomplete_checkpoint_of_unknown_origin_is_renamed(tmp_path, files):
    # A shard may have been lost in copying and come back.
    save(tmp_path, 3, tracker="3")
    save(tmp_path, 6, files)
    before = content(tmp_path)
    (line,) = settle_checkpoints(tmp_path)
    assert "global_step_6 is now called global_step_6.put_aside" in line
    assert (saved_step(tmp_path), content(tmp_path)) == (3, before)


def test_a_users_notes_are_never_removed(tmp_path):
    for step in (2, 4, 8):
        save(tmp_path, step, tracker=str(step))
    (step_folder(tmp_path, 2) / "notes.txt").write_text("in a whole checkpoint")
    step_folder(tmp_path, 6).mkdir()
    (step_folder(tmp_path, 6) / "notes.txt").write_text("where none is saved yet")
    save_and_die(tmp_path, 6, files=2)
    prune_checkpoints(tmp_path, 1)
    settle_checkpoints(tmp_path)
    assert {b"in a whole checkpoint", b"where none is saved yet"} <= content(tmp_path)
    assert not step_folder(tmp_path, 4).exists()


def test_a_second_folder_set_aside_does_not_replace_the_first(tmp_path):
    for text in ("first", "second"):
        step_folder(tmp_path, 6).mkdir()
        (step_folder(tmp_path, 6) / "notes.txt").write_text(text)
        settle_checkpoints(tmp_path)
    assert content(tmp_path) == {b"first", b"second"}


def test_a_start_from_an_earlier_step_keeps_one_generation_of_later_ones(tmp_path):
    for _ in range(3):
        save(tmp_path, 3)
        save(tmp_path, 6, tracker="6")
        settle_checkpoints(tmp_path, start=3)
        assert (saved_step(tmp_path), (tmp_path / TRACKER).read_text()) == (3, "3")
    settle_checkpoints(tmp_path, start=0)
    assert saved_step(tmp_path) == 0 and not (tmp_path / TRACKER).exists()
    left = {path.name for path in tmp_path.iterdir() if is_whole(path)}
    assert left == {"global_step_3.earlier", "global_step_6.earlier"}


def test_the_next_start_finishes_a_killed_removal(tmp_path, monkeypatch):
    for step in (2, 4):
        save(tmp_path, step, tracker=str(step))

    def killed(folder):
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("verl_ext.checkpoints.shutil.rmtree", killed)
        prune_checkpoints(tmp_path, 1)
    settle_checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", TRACKER]


@pytest.mark.parametrize("how", ["missing", "cut off"])
@pytest.mark.parametrize("name", FILES)
def test_a_step_without_weights_or_position_is_not_whole(tmp_path, name, how):
    save(tmp_path, 3)
    path = step_folder(tmp_path, 3) / name
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    # A run may save without optimizer shards. A cut-off config is read later.
    counts = "optim" not in name and (how == "missing" or not name.endswith("/config.json"))
    assert is_whole(step_folder(tmp_path, 3)) == (not counts)


def test_a_step_whose_queue_is_being_saved_is_not_whole(tmp_path):
    save(tmp_path, 3)
    (step_folder(tmp_path, 3) / "transfer_queue.tmp").mkdir()
    assert not is_whole(step_folder(tmp_path, 3))


SHARD_COUNTS = ("0", "-1", "null", "true", '"2"', "[2]", "{}", "2.5", "NaN", "Infinity", "1e400")
DAMAGED = ["", "{", "[]", "[2]", "5", "null", "{}", "[" * 100_000]


@pytest.mark.parametrize(
    "text", [*DAMAGED, *(f'{{"world_size": {n}}}' for n in SHARD_COUNTS)], ids=lambda text: text[:20]
)
def test_a_damaged_number_of_shards_is_none(tmp_path, text):
    save(tmp_path, 3)
    (step_folder(tmp_path, 3) / "actor" / "fsdp_config.json").write_text(text)
    assert shard_count(step_folder(tmp_path, 3) / "actor") is None and not is_whole(step_folder(tmp_path, 3))


@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (4, [2, 4, 6, 8]), (9, [2, 4, 6, 8]), (None, [2, 4, 6, 8])],
)
def test_pruning_keeps_the_newest_whole_ones_and_incomplete_ones(tmp_path, keep, left):
    for step in (2, 4, 6, 8):
        save(tmp_path, step, tracker=str(step))
    save(tmp_path, 10, files=3)
    prune_checkpoints(tmp_path, keep)
    assert steps(tmp_path) == [*left, 10]
