"""One document of a corpus, which fields of a record are its text, title and id, and a corpus's faults."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drzero.ops.errors import UserError

LONGEST_TEXT = 64 * 2**20  # Characters. Splitting and hashing hold several copies.
SHOWN_PLACES = 5  # Lines of a file named for one kind of fault
SHOWN = 200  # Kinds of faults listed. A source with more is no corpus.


class Origin(NamedTuple):
    """Where something was read: a file, and in a table which line, row or record, counted from 1."""

    file: str
    unit: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.file} {self.unit} {self.number}" if self.unit else self.file


@dataclass(frozen=True)
class Document:
    """A document. Documents with different origins can be equal."""

    id: str
    title: str
    text: str
    markdown: bool = False  # whether a splitter should read its headings and fences
    origin: Origin = field(default=Origin(""), compare=False)

    def digest(self) -> bytes:
        """Return a hash of id, title, text and kind (32 bytes)."""
        parts: list[str | bool] = [self.id, self.title, self.text]
        return hashlib.sha256(json.dumps(parts + [True] * self.markdown).encode()).digest()

    def content(self) -> bytes:
        """Return a hash of title and text that ignores white space (16 bytes)."""
        words = " ".join(f"{self.title}\n{self.text}".split())
        return hashlib.sha256(words.encode()).digest()[:16]


@dataclass(frozen=True)
class Fields:
    """The names of a corpus's fields. None means the default name, which records may lack."""

    text: str | None = None
    title: str | None = None
    id: str | None = None

    def document(self, record: Any, origin: Origin) -> Document:
        """Return the record's document. Raises ValueError with the fault and the key to set."""
        if not isinstance(record, Mapping):
            raise ValueError(f"not a record with fields, but {_kind(record)}")
        for setting, name in (("text", self.text), ("title", self.title), ("id", self.id)):
            if name is not None and name not in record:
                raise ValueError(f"no field {name!r}, which fields.{setting} names; {_there(record)}")
        title, text = self._title_and_text(record)
        key = _word(record.get(self.id or "id"))
        _check_encodable(f"{key}{title}{text}")
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"a text of {len(text):,} characters, of at most {LONGEST_TEXT:,}: split it")
        if not key:
            key = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:32]
        return Document(key, title, text, record.get("markdown") is True, origin)

    def _title_and_text(self, record: Mapping[str, Any]) -> tuple[str, str]:
        title, name = record.get(self.title or "title"), self.text or "text"
        text = None if is_missing(found := record.get(name)) else found
        if text is None and self.text is None and isinstance(contents := record.get("contents"), str):
            name = "contents"
            first, _, rest = contents.partition("\n")
            first = first.strip().strip('"')
            has_title = bool(rest.strip()) and (is_missing(title) or title == first)
            title, text = (first, rest) if has_title else (title, contents)
        if text is None and name not in record:
            raise ValueError(f"no text: no field 'text' or 'contents'; {_there(record)}")
        if text is None:
            raise ValueError("no text" if record.keys() == _FILE_FIELDS else f"no text: {name!r} is empty")
        if not isinstance(text, str):
            raise ValueError(f"the text ({name!r}) is {_kind(text)}, and has to be text")
        if isinstance(title, (dict, list)):
            raise ValueError(f"the title ({self.title or 'title'!r}) is {_kind(title)}, and has to be text")
        return _word(title), text


def is_missing(value: Any) -> bool:
    """Whether a field has no value: None, blank, or what is not equal to itself (NaN, NaT)."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _word(value: Any) -> str:
    # A column of whole numbers with a gap arrives as 1914.0.
    is_whole = isinstance(value, float) and value.is_integer()
    return "" if is_missing(value) else str(int(value) if is_whole else value)


_FILE_FIELDS = {"id", "title", "text", "markdown"}


def _there(record: Mapping[str, Any]) -> str:
    if not record:
        return "the record is empty"
    names = ", ".join(list(map(str, record))[:12]) + (", …" if len(record) > 12 else "")
    return (
        f"its fields are {names}: say which one has the text (fields.text=NAME; also fields.title, fields.id)"
    )


def _kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _check_encodable(text: str) -> None:
    """Raise ValueError for lone surrogates, from JSON or from bytes that `files` could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            byte = f"byte {code - 0xDC00:#x}"
            raise ValueError(f"{byte} is in another encoding than the rest of its file: convert it") from None
        raise ValueError(f"half a character (\\u{code:x}), which no store can hold") from None


# --- all faults of a source in one list, with similar faults of a file on one line ---


class CorpusError(UserError):
    """A corpus that cannot be indexed: the files, the lines or rows, and the faults there."""


@dataclass(frozen=True)
class Fault:
    """A record or file that cannot be used. `why` also says what to do, unless that is obvious."""

    origin: Origin
    why: str


@dataclass
class Faults:
    """The faults of one pass over a source, by file and kind. Memory is bounded by their kinds."""

    total: int = 0
    _groups: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)  # count, then places

    def add(self, fault: Fault) -> None:
        """Add one."""
        self.total += 1
        origin = fault.origin
        group = self._groups.setdefault((origin.file, origin.unit, fault.why), [0])
        group[0] += 1
        if len(group) <= SHOWN_PLACES:
            group.append(origin.number)

    def __bool__(self) -> bool:
        return self.total > 0

    def lines(self) -> Iterator[str]:
        """Yield a line per kind of fault and file, in reading order."""
        for place, (file, unit, why) in enumerate(self._groups):
            if place == SHOWN:
                yield f"… and {len(self._groups) - SHOWN} more kinds of faults"
                return
            count, *numbers = self._groups[file, unit, why]
            more = [f"{count - len(numbers):,} more"] if count > len(numbers) else []
            *first, last = [*map(str, numbers), *more]
            named = f"{', '.join(first)} and {last}" if first else last
            yield f"{file} {unit}{'s' * (count > 1)} {named}: {why}" if unit else f"{file}: {why}"

    def message(self, source: object) -> str:
        """The error for a source with these faults."""
        lines = list(self.lines())
        advice = "Nothing was indexed. Correct this, or leave out what is faulty with on_bad=skip"
        if len(lines) == 1:
            return f"{lines[0]}. {advice}"
        listed = "\n".join(f"  {line}" for line in lines)
        return f"{source} has {self.total:,} faults:\n{listed}\n{advice.replace('this', 'them')}"

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {"total": self.total, "list": list(self.lines())}
