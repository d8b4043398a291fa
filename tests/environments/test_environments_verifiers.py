"""`verifiers:NAME`: the names as users type them, rows, and one clear line for each thing that is missing."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from environments import registry
from environments.fault import EnvironmentUnusable
from environments.registry import find, names
from environments.verifiers import installed as packages

TASKSET = '''
"""Numbers to double."""
from typing import Literal
import verifiers.v1 as vf


class Number(vf.TaskData):
    answer: int


class Double(vf.Task[Number]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))


class DoubleConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    size: int = 30


class DoubleTaskset(vf.Taskset[Double, DoubleConfig]):
    def load(self):
        first = 0 if self.config.split == "train" else 1000
        return [Double(Number(prompt=f"Double {n}.", answer=2 * n), self.config.task)
                for n in range(first, first + self.config.size)]


__all__ = ["DoubleTaskset"]
'''
IN_A_BOX = TASKSET.replace(
    "class Double(vf.Task[Number]):", "class Double(vf.Task[Number]):\n    NEEDS_CONTAINER = True"
)
WITH_A_SHELL = TASKSET.replace(
    '__all__ = ["DoubleTaskset"]',
    'from verifiers.v1.harnesses.rlm import RLMHarness\n__all__ = ["DoubleTaskset", "RLMHarness"]',
)
BEFORE_0_4 = "def load_environment():\n    pass\n"


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    sources = {"double_v1": TASKSET, "boxed": IN_A_BOX, "shelled": WITH_A_SHELL, "old_style": BEFORE_0_4}
    sources["broken"] = "import nothing_of_this_name\n"
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in sources:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name", ["verifiers:double", "verifiers:double-v1", "verifiers:vf-double", "verifiers:me/vf_double@0.1"]
)
def test_a_taskset_is_found_by_every_name_that_users_type(name):
    taskset = find(name).load()
    assert len(taskset.rows("train", None, seed=0)) == 27


@pytest.fixture
def listed_again():
    packages.installed_tasksets.cache_clear()
    yield
    packages.installed_tasksets.cache_clear()


def test_an_installed_package_is_found_by_its_bare_name_but_ours_come_first(monkeypatch, listed_again):
    monkeypatch.setattr("environments.verifiers.installed._of_packages", lambda: {"double", "wordle"})
    assert find("vf_double").load().rows("eval", 1, seed=0)[0].data["task"]["answer"] == 2 * 9
    monkeypatch.setitem(registry.BUILT_IN, "wordle", "environments.wordle")
    assert find("vf-wordle").source == "environments.wordle"
    assert {"verifiers:double", "verifiers:textarena"} <= set(names())


def test_every_tenth_task_is_held_out_and_a_seed_always_gives_the_same_order():
    taskset = find("verifiers:double").load()
    train, held_out = (taskset.rows(split, None, seed=3) for split in ("train", "eval"))
    assert sorted(row.data["task"]["idx"] for row in held_out) == [9, 19, 29]
    assert not {row.id for row in train} & {row.id for row in held_out}
    assert taskset.rows("train", 5, seed=3) == train[:5] and taskset.rows("train", 5, seed=4) != train[:5]
    assert taskset.held_out == "every tenth task"


def test_a_taskset_with_a_split_of_its_own_is_evaluated_on_that():
    taskset = find("verifiers:double").load(evaluation={"split": "test"}, size=4)
    assert {row.data["task"]["answer"] for row in taskset.rows("train", None, 0)} == {0, 2, 4, 6}
    assert min(row.data["task"]["answer"] for row in taskset.rows("eval", None, 0)) == 2000


def test_a_row_carries_its_whole_task():
    taskset = find("verifiers:double").load()
    (row,) = taskset.rows("train", 1, seed=0)
    task = taskset.task(row)
    assert type(task).__name__ == "Double" and task.data.prompt == f"Double {task.data.answer // 2}."


def test_a_game_without_end_gives_as_many_rows_as_are_asked_for_and_holds_out_every_second():
    taskset = find("verifiers:textarena").load(game="GuessTheNumber-v0")
    seeds = [row.data["task"]["info"]["seed"] for row in taskset.rows("train", 3, seed=0)]
    assert seeds == [0, 2, 4]
    assert [row.data["task"]["idx"] for row in taskset.rows("eval", 2, seed=0)] == [1, 3]


NOT_TAKEN = "does not take these options: taskset."
BEFORE = "exports no Taskset: it is no environment, or one written for a release before 0.4"
BROKEN = "the taskset 'broken' cannot be imported: ModuleNotFoundError: No module named 'nothing"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nothing", {}, "there is no taskset 'nothing': no module nothing is installed. There are: harbor, "),
        ("double", {"size": "many"}, f"{NOT_TAKEN}size: Input should be a valid int"),
        ("double", {"solved_at": "half"}, "verifiers:double: solved_at is a reward, a number, not 'half'"),
        ("boxed", {}, "verifiers:boxed: its tasks need a container, which nothing here starts"),
        ("shelled", {}, "its seat 'agent' is played by 'shelled', which needs a sandbox"),
        ("old_style", {}, BEFORE),
        ("broken", {}, BROKEN),
    ],
)
def test_what_cannot_be_played_is_answered_with_one_line(name, options, said):
    with pytest.raises(EnvironmentUnusable) as error:
        find(f"verifiers:{name}").load(**options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_game_that_textarena_does_not_have_is_answered_with_one_line():
    taskset = find("verifiers:textarena").load(game="Chequers-v9")
    with pytest.raises(EnvironmentUnusable, match="Chequers-v9 not found") as error:
        taskset.rows("train", 1, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (None, "the package verifiers is not installed"),
        ("0.3.1", "release 0.3.1 is installed, and 0.4 is needed"),
    ],
)
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    installed, said, monkeypatch, listed_again
):
    def found(package):
        if package != "verifiers":
            return version(package)
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("environments.verifiers.installed.version", found)
    with pytest.raises(EnvironmentUnusable, match=said) as error:
        find("verifiers:double").load()
    assert '-e ".[environments]"' in str(error.value)
    # And nothing else is in the way.
    assert not [name for name in names() if name.startswith("verifiers:")]
