"""bench/house.py on a small library written for the test."""

import pytest

from bench.house import measure, table, used_once

STAGE = '''"""A stage."""

from drzero import cost


def run() -> None:
    """Run."""
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


CLI = """\"\"\"Commands.\"\"\"

COMMANDS = {
    "solver": CliCommand("drzero.stage:run"),
    "report": CliCommand("drzero.report:run"),
}
"""


@pytest.fixture
def checkout(tmp_path):
    files = {
        "drzero/__init__.py": '"""Stages."""\n',
        "drzero/stage.py": STAGE,
        "drzero/cost.py": COST,
        "drzero/cli.py": CLI,
        "drzero/report.py": "import drzero.cli\n",
        "verl_ext/rewards.py": "import drzero.report\n",
        "config/solver.yaml": "path: verl_ext/rewards.py\n",
        "tests/test_stage.py": "def test() -> None:\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_and_functions_are_counted_without_tests(checkout):
    found = measure(checkout)
    assert found["files"] == "6"
    assert found["lines"] == str(3 + sum(text.count("\n") for text in (STAGE, COST, CLI)))
    assert found["functions with a return type"] == "75 %"
    assert found["public functions and classes with a docstring"] == "50 %"
    assert found["private functions used once, of private"] == "50 % (1)"


def test_imports_are_counted_between_rooms_and_modules(checkout):
    found = measure(checkout)
    assert found["modules by room"] == (
        "verl_ext 1, drzero.cli 1, drzero.cost 1, drzero.report 1, drzero.stage 1"
    )
    assert found["modules: number, arrows, circles"] == "5, 4, 1 (drzero.cost↔drzero.stage)"
    assert found["rooms: number, arrows, circles"] == "5, 4, 1 (drzero.cost↔drzero.stage)"


def test_the_loop_needs_the_modules_of_its_commands_and_of_the_configs(checkout):
    found = measure(checkout)
    assert found["evolve and its stages need: modules, lines"].startswith("5, ")
    assert found["evolve and its stages need without flow, preflight, report, watchdog: modules, lines"] == (
        f"3, {1 + STAGE.count(chr(10)) + COST.count(chr(10))}"
    )


def test_private_functions_used_once_are_listed_by_room(checkout):
    assert list(used_once(checkout, "drzero")) == ["drzero/stage.py:13 _start"]
    assert list(used_once(checkout, "drzero/stage.py")) == ["drzero/stage.py:13 _start"]
    assert not list(used_once(checkout, "search"))


def test_the_table_has_a_column_for_each_checkout_and_each_peer(checkout):
    head, *lines = table({"before": measure(checkout), "after": measure(checkout)})
    assert head.startswith("| | before | after | verifiers |")
    assert {line.count("|") for line in lines} == {head.count("|")}
