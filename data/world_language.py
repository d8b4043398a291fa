"""The words of the demo world: invented names, and each relation as statement, noun phrase and question.

In `RELATIONS`, `says` are clauses of a passage ("was born in {y}"), `means` are noun phrases for the object
("the birthplace of {x}", empty for a plain value, which ends a walk), `asks` are questions whose answer is
the object.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SYLLABLES = (
    "b br d dr f g gr h j k kr l m n p r t tr v z",
    "a e i o u",
    "lb ld lm lv nd ndr nk nv rb rd rg rl rn rv sk vr zd zm",
    "a e i o u",
    "k l m n r s sh th x",
)

FIRM_NOUNS = ("Company", "House", "Brothers", "Works", "Guild")
WORK_NOUNS = ("Lamp", "Winter", "Garden", "Letter", "Bridge", "Mirror", "Journey", "Window")
PRONOUNS = {
    "person": ("He", "She"),
    "town": ("It", "The town"),
    "firm": ("It", "The firm"),
    "work": ("It",),
    "river": ("It", "The river"),
    "region": ("It", "The region"),
}
# A closing sentence without a fact, for passages with few facts.
COLOUR = {
    "person": (
        "Neighbours speak well of this quiet person.",
        "Little else is known of those early days.",
        "Friends remember long walks and good stories.",
    ),
    "town": (
        "Its narrow streets are quiet in winter.",
        "Visitors like the old market and the stone bridge.",
        "Most houses there are built of grey stone.",
    ),
    "firm": (
        "Its doors open early every morning.",
        "Customers praise the care it takes over small orders.",
        "Many families in the area depend on it.",
    ),
    "work": (
        "Readers still like its plain and gentle style.",
        "Critics were slow to notice it at first.",
        "Old copies of it are hard to find.",
    ),
    "river": (
        "In spring its water is high and cold.",
        "Small boats use it for most of the year.",
        "Several old mills stand along its course.",
    ),
    "region": (
        "Its hills are green for most of the year.",
        "Travellers cross it by a single long road.",
        "Most people there live in small villages.",
    ),
}


@dataclass(frozen=True)
class Relation:
    """One functional relation: kind of its subject, kind or plain values of its object, phrasings."""

    subject: str
    object: str | tuple[str, ...]
    says: tuple[str, ...]
    means: tuple[str, ...]
    asks: tuple[str, ...]


_WORDS = {
    "trade": "clockmaker baker printer gardener weaver potter carpenter surveyor tailor",
    "instrument": "flute harp cello lute trumpet piano drum violin",
    "goods": "bells paper rope soap barrels candles saddles glass lenses tiles",
    "form": "novel play poem diary comedy ballad",
    "fish": "trout pike eels carp salmon perch",
    "crop": "barley apples hops flax cherries rye plums onions",
    "emblem": "heron fox bear lantern stag crown wheel tower",
}
_VALUES = {
    **{name: tuple(words.split()) for name, words in _WORDS.items()},
    "year": tuple(str(year) for year in range(1640, 1960)),
    "length": tuple(f"{length} km" for length in range(60, 800, 7)),
}
"""Objects that are plain values."""

# Subject, name and object of each relation, then the phrasings: says, means (not for a plain value), asks.
# The first relation of each kind defines the thing and opens its passage.
_TABLE = """
person trade trade
    is a {y} | is a {y} by trade
    What is the trade of {x}? | What does {x} do for a living?
person born_in town
    was born in {y} | was born in the town of {y}
    the town where {x} was born | the birthplace of {x}
    In which town was {x} born? | Where was {x} born?
person works_for firm
    works for {y} | is employed by {y}
    the firm that {x} works for | the employer of {x}
    Which firm does {x} work for? | Who employs {x}?
person plays instrument
    plays the {y} | likes to play the {y}
    Which instrument does {x} play? | What instrument does {x} like to play?
person married_to person
    is married to {y} | is the spouse of {y}
    the spouse of {x} | the person married to {x}
    Who is married to {x}? | Who is the spouse of {x}?
person taught_by person
    was taught by {y} | was a pupil of {y}
    the teacher of {x} | the person who taught {x}
    Who taught {x}? | Who was the teacher of {x}?
town in_region region
    is a town in the region of {y} | is a small town in the region of {y}
    the region of {x} | the region that {x} belongs to
    In which region is {x}? | Which region does {x} belong to?
town on_river river
    lies on the river {y} | stands on the banks of the river {y}
    the river that flows past {x} | the river of {x}
    On which river does {x} lie? | Which river flows past {x}?
town mayor person
    has {y} as its mayor | is led by its mayor {y}
    the mayor of {x}
    Who is the mayor of {x}? | Who leads {x} as mayor?
town founded_in year
    was founded in {y} | dates from {y}
    In which year was {x} founded? | When was {x} founded?
firm makes goods
    is a firm that makes {y} | is a maker of {y}
    What does {x} make? | Which goods does {x} make?
firm based_in town
    is based in {y} | has its seat in {y}
    the town where {x} is based | the seat of {x}
    In which town is {x} based? | Where does {x} have its seat?
firm founded_by person
    was founded by {y} | was started by {y}
    the founder of {x} | the person who started {x}
    Who founded {x}? | Who is the founder of {x}?
firm opened_in year
    opened in {y} | has been in business since {y}
    In which year did {x} open? | When did {x} open?
work form form
    is a {y} | is a short {y}
    What kind of work is {x}?
work written_by person
    was written by {y} | is the work of {y}
    the author of {x} | the person who wrote {x}
    Who wrote {x}? | Who is the author of {x}?
work set_in town
    is set in {y} | takes place in {y}
    the town where {x} is set | the setting of {x}
    In which town is {x} set? | Where does {x} take place?
work published_in year
    was published in {y} | first appeared in {y}
    In which year was {x} published? | When did {x} first appear?
river rises_in region
    is a river that rises in the region of {y} | is a river from the region of {y}
    the region where {x} rises
    In which region does {x} rise? | Which region does {x} come from?
river length length
    is {y} long | runs for {y}
    How long is {x}? | What is the length of {x}?
river fish fish
    is known for its {y} | is full of {y}
    Which fish is {x} known for? | What fish live in {x}?
region capital town
    is a region with the capital {y} | is a region whose capital is {y}
    the capital of {x}
    What is the capital of {x}? | Which town is the capital of {x}?
region crop crop
    is known for growing {y} | grows {y} above all
    What does {x} grow above all? | Which crop is {x} known for?
region emblem emblem
    has a {y} on its flag | shows a {y} on its flag
    What stands on the flag of {x}? | What does the flag of {x} show?
"""


def _relations() -> Iterator[tuple[str, Relation]]:
    """The relations of the table, by name."""
    for entry in re.split(r"\n(?=\S)", _TABLE.strip()):
        first, *lines = entry.splitlines()
        subject, name, thing = first.split()
        phrasings = [tuple(line.strip().split(" | ")) for line in lines]
        if thing in _VALUES:
            phrasings.insert(1, ())
        yield name, Relation(subject, _VALUES.get(thing, thing), *phrasings)


RELATIONS = dict(_relations())


def invented_word(rng: random.Random) -> str:
    """Return a capitalised word of two syllables such as "Zolvan", out of about 160,000."""
    return "".join(rng.choice(part.split()) for part in _SYLLABLES).capitalize()


def say(rng: random.Random, relation: str, thing: str) -> str:
    """Return a clause without a subject, such as "was born in Drosken"."""
    return rng.choice(RELATIONS[relation].says).format(y=thing)
