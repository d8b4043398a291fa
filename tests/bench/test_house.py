"""The script that measures the library: what it counts, on a small library written for the test."""

from pathlib import Path

import pytest

from bench.house import circles, measure, table, used_once

STAGE = '''"""A stage."""

from drzero import cost


def run() -> None:
    """Run, as told."""
    _start()
    _stop()
    _stop()


def _start() -> None:
    cost.estimate()


def _stop() -> None:
    pass
'''
COST = '''"""The cost."""


def estimate(hours):
    from drzero import stage

    return stage
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "drzero"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Stages."""\n')
    (folder / "stage.py").write_text(STAGE)
    (folder / "cost.py").write_text(COST)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_stage.py").write_text("def test() -> None:\n    pass\n")
    return tmp_path


def test_a_checkout_is_measured_without_its_tests(checkout: Path) -> None:
    found = measure(checkout)
    assert found["files"] == "3"
    assert found["files that only describe a package"] == "1"
    assert found["lines"] == str(1 + STAGE.count("\n") + COST.count("\n"))
    assert found["functions with a return type"] == "75 %"
    assert found["public functions and classes with a docstring"] == "50 %"
    assert found["private functions used once, of all functions"] == "25 % (1)"
    assert found['"told" in text, in names'] == "1, 0"


def test_an_import_inside_a_function_makes_a_circle_too(checkout: Path) -> None:
    found = measure(checkout)["modules of drzero: number, arrows, circles"]
    assert found == "2, 2, 1 (drzero.cost ↔ drzero.stage)"


def test_private_functions_used_once_are_listed_by_room(checkout: Path) -> None:
    assert list(used_once(checkout, "drzero")) == ["drzero/stage.py:13 _start"]
    assert list(used_once(checkout, "drzero/stage.py")) == ["drzero/stage.py:13 _start"]
    assert not list(used_once(checkout, "search"))


def test_arrows_of_one_direction_make_no_circle() -> None:
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [{"a", "b", "c"}]


def test_the_table_has_a_column_for_each_checkout_and_each_anchor(checkout: Path) -> None:
    head, *lines = table({"before": measure(checkout), "after": measure(checkout)})
    assert head.startswith("| | before | after | tinker-cookbook |")
    assert {line.count("|") for line in lines} == {head.count("|")}
