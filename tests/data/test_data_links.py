"""How far the documents of a corpus lead: names of others in a text, and chains of them."""

import pytest

from data.links import can_be_counted, chain_lengths

# Orrin names the Vell, which names Teverly; nothing names Orrin, and Sarn names nothing.
ENTRIES = [
    ("1", "Orrin", "A town on the River Vell, known for its salt."),
    ("2", "River Vell", "It rises near Teverly and ends in the sea."),
    ("3", "Teverly", "A village of beekeepers."),
    ("4", "Sarn", "The capital of a province."),
]


def test_a_chain_has_the_documents_that_can_be_reached_one_after_the_other():
    assert chain_lengths(ENTRIES) == {"1": 3, "2": 2, "3": 1, "4": 1}


def test_two_that_name_each_other_are_a_chain_of_two():
    pair = [("1", "Orrin", "Near Teverly."), ("2", "Teverly", "Near Orrin.")]
    assert chain_lengths(pair) == {"1": 2, "2": 2}


def test_a_chunk_leads_where_its_own_text_does_and_on_from_any_chunk_of_a_document():
    one, two = "2#1-0123456789ab", "2#2-0123456789ab"
    chunks = [(one, "River Vell", "It rises in the hills."), (two, "River Vell", "It passes Teverly.")]
    assert chain_lengths([ENTRIES[0], *chunks, ENTRIES[2]]) == {"1": 3, one: 1, two: 2, "3": 1}


@pytest.mark.parametrize(
    ("text", "name", "title", "leads"),
    [
        ("See [the hooks](../Reference/Hooks.md#onready).", "Reference/Hooks.md", "Lifecycle Hooks", True),
        # One word to the letter.
        ("Several hooks are called.", "Reference/Hooks.md", "Lifecycle Hooks", False),
        ("See lifecycle HOOKS there.", "Reference/Hooks.md", "Lifecycle Hooks", True),  # several in any case
        ("See the Lifecycle.", "Reference/Hooks.md", "Lifecycle Hooks", False),
        # The name of a file that is a plain word counts with its suffix.
        ("A functional style.", "functional.md", "Functional Programming", False),
        ("See functional.md.", "functional.md", "Functional Programming", True),
    ],
)
def test_a_name_is_a_title_or_a_files_name(text, name, title, leads):
    entries = [("a.md", "Start", text), (name, title, "It has several.")]
    assert chain_lengths(entries)["a.md"] == 1 + leads


def test_a_name_that_is_everywhere_leads_nowhere():
    entries = [(str(n), f"Town {n:03d}", "It is on the River Vell.") for n in range(100)]
    assert set(chain_lengths([*entries, ("v", "River Vell", "A river.")]).values()) == {1}


@pytest.mark.parametrize(("name", "leads"), [("memory", False), ("Memory", True), ("core memory", True)])
def test_a_plain_word_of_more_than_one_entry_in_two_hundred_leads_nowhere(name, leads):
    # 30 of 1,000 entries have it: too many for a word of the language, few for a name.
    entries = [(str(n), f"Term {n:03d}", f"It has {name}." if n < 30 else "A term.") for n in range(1000)]
    assert chain_lengths([*entries, ("m", name, "Where data is.")])["0"] == 1 + leads


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("A town on the River Vell.", True),
        ("서울은 한강을 끼고 있다.", True),
        ("東京タワーは芝公園にある電波塔である。", False),
        ("Tokyo Tower (東京タワー) is a radio tower in Shiba Park.", True),
    ],
)
def test_links_are_counted_where_names_are_words_of_their_own(text, counted):
    assert can_be_counted([*ENTRIES[:1], ("5", "A title", text * 10)]) == counted
