"""How bench/agent_load.py counts answers."""

import pytest

from bench.agent_load import Tally, kind_of
from data.benchmarks import BenchmarkQuestion

QUESTION = BenchmarkQuestion("demo", "1", "In which town was Molmik Lorgox born?", ("Krilmem",), 1)


@pytest.mark.parametrize(
    ("answer", "search", "kind"),
    [
        ("Krilmem", "Molmik Lorgox", "right"),
        ("Porlal", "Molmik Lorgox", "wrong"),
        ("Porlal", "", "wrong"),
        (None, "Molmik Lorgox", "none"),
        ("Krilmem", "The Drizmox Mirror", "mixed"),
    ],
)
def test_an_answer_counts_by_its_own_question(answer, search, kind):
    assert kind_of(answer, search, QUESTION) == kind


def test_a_row_has_rates_over_the_whole_time():
    tally = Tally(seconds=120.0, tokens=600)
    tally.answers.update(right=8, wrong=2, left=5)
    assert tally.row("one") == "| one | 5.0 | 5 | 5 left, 8 right, 2 wrong |"
