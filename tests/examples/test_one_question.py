"""The examples run, and print every step of the method."""

import json
import re

import pytest

from examples.one_question import EMBEDDER, Player, main
from search.chroma.store import open_collection
from search.embedders import Embedder
from search.indexing.shards import build_index
from verl_ext.method.trajectory import SearchCall

TITLES = ("The corpus", "The model", "The rollouts", "The rollout with", "The reward", "The advantage")


def advantages(printed: str) -> list[tuple[float, float]]:
    """Reward and advantage of each row of the last table."""
    row = re.compile(r"^ +\d+ +\S+ +\d\.\d\d +\d\.\d\d +(\d\.\d{3}) +([+-]\d+\.\d\d) ", re.MULTILINE)
    return [(float(reward), float(advantage)) for reward, advantage in row.findall(printed)]


def test_one_question_prints_every_step_and_writes_only_into_its_outputs(
    speaking_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    main(["--model", str(speaking_model), "--questions", "6", "--outputs", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert [title for title in TITLES if f"── {title}" in printed] == list(TITLES)
    rows = advantages(printed)
    assert len(rows) == 6 and len({reward for reward, _ in rows}) > 1
    # Advantages are printed with two digits.
    assert sum(advantage for _, advantage in rows) == pytest.approx(0.0, abs=0.05)
    assert max(rows)[1] == max(advantage for _, advantage in rows) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_search_of_one_question_shows_the_model_passages(tmp_path):
    line = {"id": "a", "title": "Orrin", "text": "Orrin is a harbour town on the river Vell."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(line) + "\n")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "chromadb", "corpus", EMBEDDER)
    with open_collection(tmp_path / "chromadb", "corpus") as index:
        player = Player(None, None, Embedder(EMBEDDER), index)  # neither model nor tokenizer searches
        answered = player.answer(SearchCall("raw", ("Where is Orrin?",)))
    assert answered.response == "[1] Orrin: Orrin is a harbour town on the river Vell."


@pytest.mark.slow("the demo policy itself takes two minutes; a tiny model shows the same steps above")
def test_one_question_asks_real_questions_with_the_demo_policy(tmp_path, capsys):
    main(["--outputs", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "135 million parameters" in printed
    assert len(advantages(printed)) == 6
    assert "?" in printed.partition("question: ")[2].partition("\n")[0]
