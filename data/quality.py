"""Reports how well a corpus suits questions: its used and skipped entries, and the hops it carries."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.challenger_prompts import PrepareReport, in_words
from drzero.ops.files import atomic_write
from drzero.ops.text import counted
from search.indexing.build import IndexReport
from search.sources.corpus import Some

FILE = "quality.json"


def quality(
    prompts: PrepareReport, chains: Mapping[str, int] | None, index: IndexReport | None
) -> dict[str, Any]:
    """Return the report. `index` is None if it existed before, `chains` is None if links were not counted."""
    report: dict[str, Any] = {}
    if index is not None:
        survey = index.survey
        report["source"] = {
            "documents": survey.documents,
            "chunks": index.info.chunks,
            "duplicates": {
                "count": survey.duplicates,
                "examples": [f"{one} repeats {other}" for one, other in survey.examples],
            },
            **survey.reading.to_json(),
        }
    lengths = Counter((chains or {}).values())
    report["prompts"] = {
        "entries": prompts.corpus_documents,
        "read": prompts.read_documents,
        "too_short": vars(prompts.short),
        "without_sentences": vars(prompts.unsaid),
        "repeated": vars(prompts.repeated),
        "cut": vars(prompts.cut_documents),
        "shown": prompts.train_documents,
        "cycles": round(prompts.cycles, 2),
        "hops_asked_for": {str(hop): count for hop, count in prompts.wanted_hops.items()},
        "hops": {str(hop): count for hop, count in prompts.hop_counts.items()},
    }
    report["chains"] = (
        None if chains is None else {str(length): lengths[length] for length in sorted(lengths)}
    )
    return report


def write_quality(path: Path, report: Mapping[str, Any]) -> None:
    """Write it atomically."""
    atomic_write(path, json.dumps(report, ensure_ascii=False, indent=1) + "\n")


def quality_lines(
    prompts: PrepareReport, chains: Mapping[str, int] | None, index: IndexReport | None
) -> Iterator[str]:
    """Yield what you must know before you pay for the prompts, one thing per line."""
    if index is not None:
        yield from index.survey.reading.lines()
        if index.survey.duplicates:
            one, other = index.survey.examples[0]
            skipped = counted(index.survey.duplicates, "duplicate")
            yield f"{skipped} skipped (such as {one}, which repeats {other})"
    if prompts.read_documents < prompts.corpus_documents:
        yield (
            f"{prompts.read_documents:,} of {prompts.corpus_documents:,} entries were drawn at random, as "
            "many as needed. The counts below refer to them"
        )
    yield from _left_out(prompts.short, prompts, "too short to ask about")
    yield from _left_out(prompts.unsaid, prompts, "with hardly a sentence to ask about")
    yield from _left_out(prompts.repeated, prompts, "with the words of another entry")
    yield from _left_out(prompts.cut_documents, prompts, "too long and cut after a sentence")
    if chains is None:
        why = "a large corpus, a script without spaces, or fit_hops=false"
        yield f"links of documents were not counted ({why}): the hop ratio is kept"
        return
    lengths = Counter(chains.values())
    two, three, four = (sum(lengths[more] for more in lengths if more >= hop) for hop in (2, 3, 4))
    yield (
        f"of {len(chains)} entries {two} begin a chain of 2 documents that name each other, {three} of 3, "
        f"{four} of 4"
    )
    if prompts.hop_counts != prompts.wanted_hops:
        yield (
            f"the hop ratio is adapted because too few documents lead to others: "
            f"{in_words(prompts.hop_counts)}, not {in_words(prompts.wanted_hops)}"
        )


def _left_out(some: Some, prompts: PrepareReport, what: str) -> Iterator[str]:
    if some.count:
        yield f"{some.count} of {prompts.read_documents} entries {what} (such as {some.examples[0][:80]!r})"
