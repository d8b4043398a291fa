"""The words of the demo world: invented names, and each relation as statement, noun phrase and question.

Every entry of `RELATIONS` is one functional relation. `says` are clauses of a passage ("was born in {y}"),
`means` are noun phrases for its object given its subject ("the birthplace of {x}"; empty where the object is
a plain value, at which a walk ends), `asks` are the questions whose answer is the object.
"""

import random
from dataclasses import dataclass

_ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "t",
    "tr",
    "v",
    "z",
)
_MIDDLES = (
    "lb",
    "ld",
    "lm",
    "lv",
    "nd",
    "ndr",
    "nk",
    "nv",
    "rb",
    "rd",
    "rg",
    "rl",
    "rn",
    "rv",
    "sk",
    "vr",
    "zd",
    "zm",
)
_ENDS = ("k", "l", "m", "n", "r", "s", "sh", "th", "x")
_VOWELS = "aeiou"

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
# A closing sentence without any fact, for passages that have few.
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
    """One functional relation: the kind of its subject, the kind or plain values of its object, its words."""

    subject: str
    object: str | tuple[str, ...]
    says: tuple[str, ...]
    means: tuple[str, ...]
    asks: tuple[str, ...]


_TRADES = (
    "clockmaker",
    "baker",
    "printer",
    "gardener",
    "weaver",
    "potter",
    "carpenter",
    "surveyor",
    "tailor",
)
_INSTRUMENTS = ("flute", "harp", "cello", "lute", "trumpet", "piano", "drum", "violin")
_GOODS = ("bells", "paper", "rope", "soap", "barrels", "candles", "saddles", "glass", "lenses", "tiles")
_FORMS = ("novel", "play", "poem", "diary", "comedy", "ballad")
_FISH = ("trout", "pike", "eels", "carp", "salmon", "perch")
_CROPS = ("barley", "apples", "hops", "flax", "cherries", "rye", "plums", "onions")
_EMBLEMS = ("heron", "fox", "bear", "lantern", "stag", "crown", "wheel", "tower")
_YEARS = tuple(str(year) for year in range(1640, 1960))
_LENGTHS = tuple(f"{length} km" for length in range(60, 800, 7))

# The first relation of each kind says what the thing is: it opens the passage.
RELATIONS: dict[str, Relation] = {
    # person
    "trade": Relation(
        "person",
        _TRADES,
        ("is a {y}", "is a {y} by trade"),
        (),
        ("What is the trade of {x}?", "What does {x} do for a living?"),
    ),
    "born_in": Relation(
        "person",
        "town",
        ("was born in {y}", "was born in the town of {y}"),
        ("the town where {x} was born", "the birthplace of {x}"),
        ("In which town was {x} born?", "Where was {x} born?"),
    ),
    "works_for": Relation(
        "person",
        "firm",
        ("works for {y}", "is employed by {y}"),
        ("the firm that {x} works for", "the employer of {x}"),
        ("Which firm does {x} work for?", "Who employs {x}?"),
    ),
    "plays": Relation(
        "person",
        _INSTRUMENTS,
        ("plays the {y}", "likes to play the {y}"),
        (),
        ("Which instrument does {x} play?", "What instrument does {x} like to play?"),
    ),
    "married_to": Relation(
        "person",
        "person",
        ("is married to {y}", "is the spouse of {y}"),
        ("the spouse of {x}", "the person married to {x}"),
        ("Who is married to {x}?", "Who is the spouse of {x}?"),
    ),
    "taught_by": Relation(
        "person",
        "person",
        ("was taught by {y}", "was a pupil of {y}"),
        ("the teacher of {x}", "the person who taught {x}"),
        ("Who taught {x}?", "Who was the teacher of {x}?"),
    ),
    # town
    "in_region": Relation(
        "town",
        "region",
        ("is a town in the region of {y}", "is a small town in the region of {y}"),
        ("the region of {x}", "the region that {x} belongs to"),
        ("In which region is {x}?", "Which region does {x} belong to?"),
    ),
    "on_river": Relation(
        "town",
        "river",
        ("lies on the river {y}", "stands on the banks of the river {y}"),
        ("the river that flows past {x}", "the river of {x}"),
        ("On which river does {x} lie?", "Which river flows past {x}?"),
    ),
    "mayor": Relation(
        "town",
        "person",
        ("has {y} as its mayor", "is led by its mayor {y}"),
        ("the mayor of {x}",),
        ("Who is the mayor of {x}?", "Who leads {x} as mayor?"),
    ),
    "founded_in": Relation(
        "town",
        _YEARS,
        ("was founded in {y}", "dates from {y}"),
        (),
        ("In which year was {x} founded?", "When was {x} founded?"),
    ),
    # firm
    "makes": Relation(
        "firm",
        _GOODS,
        ("is a firm that makes {y}", "is a maker of {y}"),
        (),
        ("What does {x} make?", "Which goods does {x} make?"),
    ),
    "based_in": Relation(
        "firm",
        "town",
        ("is based in {y}", "has its seat in {y}"),
        ("the town where {x} is based", "the seat of {x}"),
        ("In which town is {x} based?", "Where does {x} have its seat?"),
    ),
    "founded_by": Relation(
        "firm",
        "person",
        ("was founded by {y}", "was started by {y}"),
        ("the founder of {x}", "the person who started {x}"),
        ("Who founded {x}?", "Who is the founder of {x}?"),
    ),
    "opened_in": Relation(
        "firm",
        _YEARS,
        ("opened in {y}", "has been in business since {y}"),
        (),
        ("In which year did {x} open?", "When did {x} open?"),
    ),
    # work
    "form": Relation(
        "work",
        _FORMS,
        ("is a {y}", "is a short {y}"),
        (),
        ("What kind of work is {x}?",),
    ),
    "written_by": Relation(
        "work",
        "person",
        ("was written by {y}", "is the work of {y}"),
        ("the author of {x}", "the person who wrote {x}"),
        ("Who wrote {x}?", "Who is the author of {x}?"),
    ),
    "set_in": Relation(
        "work",
        "town",
        ("is set in {y}", "takes place in {y}"),
        ("the town where {x} is set", "the setting of {x}"),
        ("In which town is {x} set?", "Where does {x} take place?"),
    ),
    "published_in": Relation(
        "work",
        _YEARS,
        ("was published in {y}", "first appeared in {y}"),
        (),
        ("In which year was {x} published?", "When did {x} first appear?"),
    ),
    # river
    "rises_in": Relation(
        "river",
        "region",
        ("is a river that rises in the region of {y}", "is a river from the region of {y}"),
        ("the region where {x} rises",),
        ("In which region does {x} rise?", "Which region does {x} come from?"),
    ),
    "length": Relation(
        "river",
        _LENGTHS,
        ("is {y} long", "runs for {y}"),
        (),
        ("How long is {x}?", "What is the length of {x}?"),
    ),
    "fish": Relation(
        "river",
        _FISH,
        ("is known for its {y}", "is full of {y}"),
        (),
        ("Which fish is {x} known for?", "What fish live in {x}?"),
    ),
    # region (its capital is drawn last, among its own towns)
    "capital": Relation(
        "region",
        "town",
        ("is a region with the capital {y}", "is a region whose capital is {y}"),
        ("the capital of {x}",),
        ("What is the capital of {x}?", "Which town is the capital of {x}?"),
    ),
    "crop": Relation(
        "region",
        _CROPS,
        ("is known for growing {y}", "grows {y} above all"),
        (),
        ("What does {x} grow above all?", "Which crop is {x} known for?"),
    ),
    "emblem": Relation(
        "region",
        _EMBLEMS,
        ("has a {y} on its flag", "shows a {y} on its flag"),
        (),
        ("What stands on the flag of {x}?", "What does the flag of {x} show?"),
    ),
}


def invented_word(rng: random.Random) -> str:
    """A capitalised word of two syllables such as "Zolvan"; about 160,000 are possible."""
    parts = (_ONSETS, _VOWELS, _MIDDLES, _VOWELS, _ENDS)
    return "".join(rng.choice(part) for part in parts).capitalize()


def say(rng: random.Random, relation: str, thing: str) -> str:
    """A clause that states a relation, without its subject: "was born in Drosken"."""
    return rng.choice(RELATIONS[relation].says).format(y=thing)
