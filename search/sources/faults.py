"""All faults of a source in one list, with similar faults of a file on one line.

faults.add(Fault(Origin("a.jsonl", "line", 3), "no text"))
raise CorpusError(faults.message("papers/"))
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.errors import UserError
from search.sources.document import Origin

SHOWN_PLACES = 5  # Lines of a file named for one kind of fault
SHOWN = 200  # Kinds of faults listed. A source with more is no corpus.


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
