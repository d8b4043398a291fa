"""Whether a text is one clear question, in English words or in any language's punctuation.

The patterns are English. docs/languages.md says what holds in other languages.
"""

import re
import unicodedata

from data.leaks import is_unspaced, length_in_words, words_of
from verl_ext.method.answers import space_characters

MAX_QUESTION_WORDS = 50  # the published recipe cuts longer ones, which may then ask for nothing

_ASKING = "who|whom|whose|what|which|when|where|why|how"
# "Will" and "May" also begin names, so they prove nothing without a question mark.
_AUXILIARY = "is|are|was|were|do|does|did|has|have|had|can|could"
_PREPOSITION = (
    "in|on|at|to|from|of|by|for|with|under|over|near|during|after|before|into|through|about|besides|since|as"
    "|against|among|between|within|without|until|upon|above|below|across|along|around|behind|beyond|inside"
    "|outside|toward|towards"
)
# "Name", "state" and "list" are also nouns, so what they ask for must follow.
_IMPERATIVE = "name|list|identify|give|tell|find|determine|specify|state"
_ASKED_FOR = rf"the|an?|all|any|both|one|two|three|me|us|its|his|her|their|every|each|{_ASKING}|\S+['’]s?"
_BEGINS_AS_QUESTION = re.compile(
    rf"(?:(?:{_PREPOSITION})\s+)?(?:{_ASKING})\b|(?:{_AUXILIARY})\b|(?:{_IMPERATIVE})\s+(?:{_ASKED_FOR})(?!\S)",
    re.IGNORECASE,
)
# Arabic ؟ and Ethiopic ፧, the interrobang, and Japanese か; NFKC turns the other forms of "?" into it.
_ENDS_AS_QUESTION = re.compile(r"(?:[?؟፧‽]|か。?)$")
# The Armenian mark stands inside a word. The Greek one looks like a semicolon.
_ASKS_WITHIN = re.compile(r"՞|[\u0370-\u03ff\u1f00-\u1fff]\W*;$")
_EXCLAIMS = re.compile(r"(?:what an?|how)\b[^?]*!$", re.IGNORECASE)
_AROUND = " \t\"'“”‘’«»「」『』()*_"

_SOURCE = "document|passage|text|paragraph|article|excerpt"
_SAYS = "says?|states?|mentions?|describes?|tells?|discuss(?:es)?|refers?|explains?|notes?|provides?|names?"
_COUNT = r"\d+|one|two|three|four|five|multi(?:ple)?"
_LEFTOVERS = {
    "a tag": re.compile(r"</?[a-z][a-z_]*\s*/?>|<\s?\||\|>", re.IGNORECASE),
    "a placeholder": re.compile(
        r"\byour (?:question|answer)\b|\bits short answer\b|\{[\w .…]*\}"
        r"|\[\s*(?:insert|your|the|an?|question|answer|name|entity|placeholder|document|…|\.\.\.)[^\]]*\]",
        re.IGNORECASE,
    ),
    "a label": re.compile(
        rf"^\W*(?:(?:final|new)\s+)?(?:question|q)\s*\d*\W{{0,3}}:|\banswer\s*:|\bhop\s+\d+\s*:"
        rf"|\b(?:{_COUNT})[\s-]hops?\s*(?:question\b|:)",
        re.IGNORECASE,
    ),
    # The solver never sees the source. "The text of the treaty" is clear without it, "the text" is not.
    "a mention of the source": re.compile(
        rf"\b(?:this|above|given|provided|following|preceding)\s+(?:{_SOURCE}|context)s?\b"
        rf"|\b(?:{_SOURCE})s?\s+(?:above|below|given|provided)\b"
        rf"|\b(?:according to|in|from|on|by|per) the (?:{_SOURCE}|context)\b"
        r"(?!\s+(?:of|in|on|that|which|about|titled|called|known|named|numbered|by|signed|written|between)\b)"
        rf"|\bthe (?:{_SOURCE})s?\s+(?:{_SAYS})\b"
        r"|\bas (?:described|mentioned|stated|noted|discussed) (?:earlier|above|before|previously|below)\b",
        re.IGNORECASE,
    ),
    "an instruction": re.compile(
        r"\b(?:ignore|disregard|forget)\s+(?:(?:all|any|the|of)\s+)*"
        r"(?:(?:previous|prior|above|earlier|your|these)\s+(?:\w+\s+)?(?:instructions?|prompts?|rules?)"
        r"|(?:instructions?|prompts?|rules?)\s+(?:above|before))\b|\bsystem prompt\b",
        re.IGNORECASE,
    ),
}

_SECOND = re.compile(rf"[?؟፧‽][\s*_]+(?P<rest>(?:{_BEGINS_AS_QUESTION.pattern}).*[?؟፧‽])", re.IGNORECASE)
# "And which is …" and "and who was …" may be relative clauses.
_JOINED = re.compile(
    rf"\band\s+(?:(?:what|when|where|why|how(?:\s+(?:many|much|long|old|far|tall|high)(?:\s+\w+)?)?)"
    rf"|(?:(?:{_PREPOSITION})\s+)?(?:which|what)\s+(?!(?:he|she|it|they|we|you|i|the|an?)\b)\w+)"
    rf"\s+(?:{_AUXILIARY})\b",
    re.IGNORECASE,
)
_ASKS_FOR = rf"(?:(?:{_PREPOSITION})\s+)?(?:{_ASKING})"
_DANGLING = re.compile(
    # Where was he born? Which firm do they work for?
    rf"(?:{_ASKS_FOR}(?:\s+(?-i:[a-z])\w*){{0,3}}?\s+)?(?:{_AUXILIARY})\s+(?:he|she|they)\b"
    # Who is his teacher? But "Which king did his brother murder?" says whose.
    rf"|{_ASKS_FOR}\s+(?:{_AUXILIARY})\s+(?:his|her|their|its)\s+(?-i:[a-z])"
    # Who taught her?
    rf"|(?:who|what)\s+\w+\s+(?:him|her|them|it)(?:\s+(?:{_PREPOSITION})\b|\W*$)"
    # When was it founded? But "What is it called when water turns to steam?" goes on to say.
    rf"|(?=\S+(?:\s+\S+){{0,5}}\s*$){_ASKS_FOR}(?:\s+\w+)?\s+(?:{_AUXILIARY})\s+(?:it|this|these|those)\b(?!\s+that\b)",
    re.IGNORECASE,
)

_ASKS_YES_NO = re.compile(rf"(?:^|,\s*)(?:{_AUXILIARY}|will|would|should|might|must)\s", re.IGNORECASE)
_OTHER = (
    "the|that|this|its|his|her|their|and|or|not|than|if|while|although|because|will|would|should|might|must"
)
_COMMON = frozenset("|".join((_ASKING, _AUXILIARY, _PREPOSITION, _IMPERATIVE, _OTHER)).split("|"))
# Chinese and Japanese particles and question words, and the particles that end a Korean word.
_PARTICLES = "的是在了谁誰什么甚麼哪何由于於和与與被把从從对對为為吗嗎呢几幾多少はがをにのでともかやへ"
_BETWEEN_PARTICLES = re.compile(rf"[^\W_a-z\d{_PARTICLES}]{{3,}}")
_ENDINGS = "은는이가을를의에와과로도서"
_SAME_LETTERS = 4  # names that share this many first letters count as one: Norway, Norwegian

_POINTING = (
    "it|its|he|him|his|she|her|hers|they|them|their|theirs|this|that|these|those|there|here"
    "|is|are|was|were|be|been|one|ones|same|such"
)
_POINTS_ELSEWHERE = frozenset(_POINTING.split("|"))
_CONTRACTION = re.compile(r"['’](?:s|re|ve|d|ll)\b", re.IGNORECASE)


def is_question(text: str) -> bool:
    """Whether three or more words end with a question mark or open like a question ("Name the …")."""
    bare = unicodedata.normalize("NFKC", text).strip(_AROUND)
    if len(space_characters(bare).split()) < 3 or _EXCLAIMS.match(bare):
        return False
    return any((_ENDS_AS_QUESTION.search(bare), _ASKS_WITHIN.search(bare), _BEGINS_AS_QUESTION.match(bare)))


def unclear(question: str) -> str | None:
    """Return why the question is unclear ("asks twice", …), or None."""
    bare = unicodedata.normalize("NFKC", question).strip(_AROUND)
    if _SECOND.search(bare) or (_BEGINS_AS_QUESTION.match(bare) and _JOINED.search(bare)):
        return "asks twice"
    if _DANGLING.match(bare):
        return "does not say who or what it is about"
    words = round(length_in_words(space_characters(question).split()))
    return (
        f"has {words} words, at most {MAX_QUESTION_WORDS} are allowed" if words > MAX_QUESTION_WORDS else None
    )


def names_nothing(answer: str) -> bool:
    """Whether the answer is only words that point elsewhere: "It's", "these ones". "IT" may be a name."""
    words = words_of(_CONTRACTION.sub("", answer))
    return bool(words) and not answer.isupper() and _POINTS_ELSEWHERE.issuperset(words)


def asks_yes_no(question: str) -> bool:
    """Whether yes and no can answer the question: "Is …?", "In 1914, was …?"."""
    return _ASKS_YES_NO.search(question.strip(_AROUND)) is not None


def names_of(question: str) -> set[str]:
    """Return the words of the question's capitalised names, or else its uncommon words, and its numbers."""
    tokens = re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", question))
    names = {word for token in tokens if token[0].isupper() for word in words_of(token)} - _COMMON
    words = {word for token in tokens for word in words_of(token)} - _COMMON
    return {word for word in words if word[0].isdigit() or (word in names if names else len(word) > 3)}


def unspaced_name(question: str) -> str:
    """Return the longest run of three or more Han, kana or Hangul letters between particles, or ""."""
    tokens = ("".join(words_of(token)) for token in question.split())
    runs = [run for token in tokens for run in _BETWEEN_PARTICLES.findall(token) if is_unspaced(run)]
    return max((run.rstrip(_ENDINGS) for run in runs), key=len, default="")


def share_of_names(question: str, text: str) -> float:
    """Return the share of the question's names that occur in the text, or 1 if it has none."""
    names = names_of(question)
    there = {word[:_SAME_LETTERS] for word in words_of(text)}
    return sum(name[:_SAME_LETTERS] in there for name in names) / len(names) if names else 1.0


def template_leftover(text: str) -> str | None:
    """Return the kind of leftover template text ("a tag", "a placeholder", …) and the match, or None."""
    for kind, pattern in _LEFTOVERS.items():
        if found := pattern.search(text):
            return f"{kind} ({found[0]!r})"
    return None
