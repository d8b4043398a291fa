"""Claims of calls on runs, in a table where a key can be written only once."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from drzero.launch.arguments import parse
from drzero.launch.claims import Claims
from drzero.launch.compute import MODAL_LIMIT_S
from drzero.launch.errors import LaunchError
from drzero.launch.request import Request, resolve


class Table:
    """A Modal Dict. `before_put` runs once before a conditional write, like another container."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.before_put: Any = lambda: None

    def put(self, key: str, value: Any, *, skip_if_exists: bool = False) -> bool:
        if skip_if_exists:
            before, self.before_put = self.before_put, lambda: None
            before()
        if skip_if_exists and key in self.values:
            return False
        self.values[key] = value
        return True

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def items(self) -> Iterator[tuple[str, Any]]:
        yield from list(self.values.items())


class Modal:
    def __init__(self) -> None:
        self.running = {"fc-1", "fc-2", "fc-3"}
        self.now = 1e9
        self.table = Table()

    def claims(self) -> Claims:
        table: Any = self.table
        return Claims(table, self.running.__contains__, lambda: self.now)


@pytest.fixture
def modal():
    return Modal()


def request_of(action: str, launch: str, *words: str) -> Request:
    return dataclasses.replace(resolve(parse(["--action", action, *words])), id=launch)


def test_a_call_that_is_started_again_keeps_its_run(modal):
    request = request_of("solver", "one")
    assert [modal.claims().take(request, "fc-1", "ap-1") for _ in range(2)] == ["fc-1", "fc-1"]
    assert len(modal.table.values) == 1


def test_a_second_call_of_the_same_part_is_given_the_first(modal):
    request = request_of("solver", "one")
    modal.claims().take(request, "fc-1", "ap-1")
    assert modal.claims().take(request, "fc-2", "ap-1") == "fc-1"
    assert modal.claims().call_of(request) == "fc-1"


def test_of_two_calls_at_the_same_moment_one_has_the_part(modal):
    request = request_of("solver", "one")
    modal.table.before_put = lambda: modal.claims().take(request, "fc-2", "ap-1")
    assert modal.claims().take(request, "fc-1", "ap-1") == "fc-2"


def test_the_next_part_follows_while_its_predecessor_still_ends(modal):
    request = request_of("solver", "one")
    modal.claims().take(request, "fc-1", "ap-1")
    assert modal.claims().take(request.next_part(), "fc-2", "ap-1") == "fc-2"
    assert modal.claims().call_of(request) == "fc-1"


def test_another_launch_is_refused_with_the_app_to_stop_until_the_call_has_ended(modal):
    modal.claims().take(request_of("solver", "one"), "fc-1", "ap-1")
    other = request_of("solver", "two")
    for refused in (
        lambda: modal.claims().require_free(other),
        lambda: modal.claims().take(other, "fc-2", "ap-2"),
    ):
        with pytest.raises(LaunchError, match=r"another launch of this run is running.*modal app stop ap-1"):
            refused()
    modal.running.discard("fc-1")
    assert modal.claims().take(other, "fc-2", "ap-2") == "fc-2"


def test_a_run_is_running_by_its_own_launch_or_as_a_stage_of_the_loop(modal):
    assert modal.claims().running("solver_iter1") is None
    modal.claims().take(request_of("evolve", "one"), "fc-1", "ap-1")
    found = modal.claims().running("solver_iter1")
    assert found is not None and found.call == "fc-1" and modal.claims().running("my_solver") is None
    modal.claims().take(request_of("evolve", "one").next_part(), "fc-2", "ap-1")
    assert (found := modal.claims().running("evolve")) is not None and found.call == "fc-2"
    modal.running.clear()
    assert modal.claims().running("solver_iter1") is None


def test_of_two_launches_at_the_same_moment_one_has_the_run(modal):
    first, second = request_of("solver", "one"), request_of("solver", "two")
    modal.table.before_put = lambda: modal.claims().take(second, "fc-2", "ap-2")
    with pytest.raises(LaunchError, match="another launch of this run is running"):
        modal.claims().take(first, "fc-1", "ap-1")


@pytest.mark.parametrize(
    ("first", "second"), [("evolve", "solver"), ("merge", "evolve"), ("evolve", "synthesize")]
)
def test_the_loop_and_its_stages_exclude_each_other(modal, first, second):
    modal.claims().take(request_of(first, "one"), "fc-1", "ap-1")
    with pytest.raises(LaunchError, match=f"{first}.* is running"):
        modal.claims().take(request_of(second, "two"), "fc-2", "ap-2")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("evolve",), ("solver", "run.name=mine")),
        (("evolve",), ("prepare-data",)),
        (("solver", "--iteration", "1"), ("solver", "--iteration", "2")),
    ],
)
def test_runs_in_folders_of_their_own_do_not(modal, first, second):
    modal.claims().take(request_of(first[0], "one", *first[1:]), "fc-1", "ap-1")
    assert modal.claims().take(request_of(second[0], "two", *second[1:]), "fc-2", "ap-2") == "fc-2"


def test_a_claim_older_than_any_call_holds_no_longer(modal):
    modal.claims().take(request_of("solver", "one"), "fc-1", "ap-1")
    modal.now += 2 * MODAL_LIMIT_S
    assert modal.claims().take(request_of("solver", "two"), "fc-2", "ap-2") == "fc-2"
