"""Helpers for messages and for values that people type."""

import math

import pytest

from drzero.ops.text import counted, did_you_mean, is_loopback, is_number, nearest, suggest


def test_the_closest_names_come_first():
    assert nearest("solvr", ["challenger", "solver", "resolver"], n=2) == ["solver", "resolver"]


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (1, "GPU", "1 GPU"),
        (0, "GPU", "0 GPUs"),
        (8.0, "CPU", "8 CPUs"),
        (1.0, "CPU", "1 CPU"),
        (13594, "chunk", "13,594 chunks"),
        (2500000, "chunk", "2,500,000 chunks"),
        (0.5, "GPU", "0.5 GPUs"),
    ],
)
def test_a_number_has_its_noun(number, noun, shown):
    assert counted(number, noun) == shown


def test_an_unknown_name_gets_a_question_only_if_one_looks_like_it():
    assert did_you_mean("solvr", iter(["challenger", "solver"])) == " (did you mean 'solver'?)"
    assert did_you_mean("xyz", ["challenger"]) == ""
    assert suggest(["a", "b", "a"]) == " (did you mean 'a' or 'b'?)"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:6379", True),
        ("localhost:6379", True),
        ("[::1]:6379", True),
        ("::1", True),
        ("http://127.0.0.1:8000/v1", True),
        ("https://[::1]/v1", True),
        ("10.0.0.1:6379", False),
        ("[fd00::1]:6379", False),
        ("head.cluster:6379", False),
        ("0.0.0.0", False),
        ("https://localhost.example.com", False),
        ("", False),
        ("http://[", False),
    ],
)
def test_only_loopback_addresses_are_this_machine(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (0.5, True),
        (True, True),
        (math.nan, False),
        (math.inf, False),
        (10**400, False),
        ("1", False),
    ],
)
def test_a_number_is_finite(value, expected):
    assert is_number(value) is expected
