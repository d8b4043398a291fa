"""Which examples of a selection are shown, and how."""

from made_pairs import DOCUMENT, last_turn, prompt, record, search

from data.examples import Examples, evidence, of_selection
from data.gates import Gates, GateSettings
from data.selection import prompts_by_index, select
from data.spread import spread
from verl_ext.method.trajectory import Trajectory, Turn

WITHOUT_AN_ANSWER = "document, without the answer: Drosken: Drosken is a town"


def test_each_kind_has_its_turn_before_a_second_of_any():
    assert spread(["a1", "a2", "b1", "a3", "c1"], lambda item: item[0]) == ["a1", "b1", "c1", "a2", "a3"]
    assert spread([], lambda item: item) == []


def test_the_evidence_is_the_place_that_has_the_answer():
    said = Trajectory((search(), Turn(last_turn())))
    assert evidence("Galmir", DOCUMENT, said).startswith("document: Drosken: Drosken is a town")
    assert evidence("Tesk", DOCUMENT, said).startswith("found: Galmir: Galmir is a river")
    assert evidence("Oslo", DOCUMENT, said).startswith(WITHOUT_AN_ANSWER)
    assert evidence(None, DOCUMENT, said).startswith(WITHOUT_AN_ANSWER)


def test_a_long_text_is_shown_around_the_answer():
    text = f"{'before ' * 100}the river Galmir{' after' * 100}"
    shown = evidence("Galmir", text, Trajectory())
    assert "the river Galmir" in shown and shown.endswith("…") and len(shown) < 400


def test_of_a_selection_three_of_each_kind_are_shown_with_reasons_and_evidence():
    towns = [f"Drosken{letter}" for letter in "abcdefgh"]
    rows = [prompt(index, document=DOCUMENT.replace("Drosken", town)) for index, town in enumerate(towns)]
    asked = [last_turn(f"On which river does {town} lie?") for town in towns[:4]]
    proper = [record(said, prompt_index=index) for index, said in enumerate(asked)]
    bad = [
        record("I know nothing.", prompt_index=4),
        record("I know nothing either.", prompt_index=5),
        record(last_turn("On which river does Droskeng lie?", "Rhine"), prompt_index=6),
        record(last_turn("Does Droskenh lie on the Galmir?", "Galmir"), prompt_index=7),
    ]
    records = [*proper, *bad]
    by_prompt = {each["prompt_index"]: [each] for each in records}
    found = select(by_prompt, rows, Gates(GateSettings(near_duplicates=False)))
    shown = of_selection(found, prompts_by_index(rows), records)
    assert [one.doc_id for one in shown.accepted] == ["doc0", "doc1", "doc2"]
    assert {one.reason for one in shown.accepted} == {"passed every gate"}
    assert [one.reason.partition(":")[0] for one in shown.rejected] == ["pair", "evidence", "integrity"]
    second = shown.rejected[1]
    asked = (second.hop, second.doc_id, second.question, second.answer)
    assert asked == (1, "doc6", "On which river does Droskeng lie?", "Rhine")
    assert second.evidence.startswith("document, without the answer: Droskeng")
    assert Examples.from_dict(shown.to_dict()) == shown


def test_where_nothing_was_asked_nothing_is_shown():
    rows = [prompt()]
    found = select({}, rows, Gates(GateSettings(near_duplicates=False)))
    assert of_selection(found, prompts_by_index(rows), []) == Examples([], [])
