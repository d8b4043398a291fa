"""Environments by the names users type: built-in ones, their own, and installed ones."""

import importlib.metadata
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from environments import registry
from environments.fault import EnvironmentUnusable
from environments.registry import find, names
from environments.taskset import Taskset

OWN = """
from environments.taskset import Taskset
class Own(Taskset):
    def rows(self, split, n, seed): return []
    def episode(self, row): raise NotImplementedError
def load(turns=1):
    made = Own(); made.max_turns = turns
    return made
"""


@pytest.fixture
def folder(tmp_path):
    own = tmp_path / "environments"
    for place in ("alone.py", "my_package/__init__.py", "vf-project/vf_project.py", ".hidden/__init__.py"):
        (own / place).parent.mkdir(parents=True, exist_ok=True)
        (own / place).write_text(OWN)
    (own / "notes.txt").write_text("nothing")
    return own


@pytest.mark.parametrize("name", ["wordle", "vf-wordle", "vf_wordle", "Wordle", "VF_WORDLE"])
def test_one_environment_has_one_name_however_it_is_typed(name):
    assert find(name).load().name == "wordle"


TYPED = [("alone", "alone"), ("my-package", "my-package"), ("my_package", "my-package")]
TYPED += [("vf_project", "project")]


@pytest.mark.parametrize(("typed", "name"), TYPED)
def test_the_users_own_are_found_in_their_folder(folder, typed, name):
    taskset = find(typed, folder).load(turns=3)
    assert isinstance(taskset, Taskset) and (taskset.name, taskset.max_turns) == (name, 3)


def test_what_is_no_environment_in_that_folder_is_left_alone(folder):
    assert set(names(folder)) - set(names()) == {"alone", "my-package", "project"}


def test_in_the_checkout_the_packages_own_modules_are_no_environments():
    assert names(Path(registry.__file__).parent) == names()


def test_a_module_of_the_users_own_shadows_none(folder):
    (folder / "json.py").write_text(OWN)
    find("json", folder).load()
    assert "loads" in vars(sys.modules["json"])


def test_two_folders_with_one_name_do_not_mix(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "alone.py").write_text(OWN.replace("turns=1", "turns=7"))
    assert [find("alone", place).load().max_turns for place in (folder, other, folder)] == [1, 7, 1]


@pytest.fixture
def installed(folder, monkeypatch):
    (folder.parent / "drzero_test_package.py").write_text(OWN.replace("def load", "def make"))
    monkeypatch.syspath_prepend(str(folder.parent))
    entry = EntryPoint("vf_installed", "drzero_test_package:make", registry.GROUP)
    found = importlib.metadata.entry_points
    monkeypatch.setattr(
        registry, "entry_points", lambda group: EntryPoints([entry]) if group == registry.GROUP else found()
    )
    yield
    sys.modules.pop("drzero_test_package", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_is_found_by_its_entry_point():
    assert find("installed").load().name == "installed"


def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are(folder):
    with pytest.raises(EnvironmentUnusable) as refused:
        find("wordel", folder)
    said = str(refused.value)
    before, _, there_are = said.partition("?). There are: ")
    assert before.endswith("'wordel' (did you mean 'wordle'")
    assert all(
        name in there_are for name in ("alone, ", "my-package, ", "project", "wordle", "bfcl-single-turn, ")
    )
    assert str(folder) in said and "\n" not in said


@pytest.mark.parametrize("name", ["nobody:x", "nobody:", ":", ""])
def test_an_unknown_family_is_an_unknown_name(name):
    with pytest.raises(EnvironmentUnusable, match="there is no environment"):
        find(name)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_to"),
        ("def load(: pass", "cannot be loaded: SyntaxError"),
        ("x = 1", "has no function load()"),
        ("def load(): return 3", "load() gave a int, not a Taskset"),
        ("def load(): raise OSError('no\\ndata')", "cannot be loaded: OSError: no data"),
        ("def load(turns): pass", "cannot be loaded: TypeError: load() missing 1 required"),
    ],
)
def test_one_that_cannot_be_loaded_says_why_in_one_line(tmp_path, code, said):
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(EnvironmentUnusable) as refused:
        find("broken", tmp_path).load()
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert str(tmp_path / "broken.py") in str(refused.value)
