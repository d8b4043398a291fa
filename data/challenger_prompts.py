"""Makes the challenger's training file and its held-out split from a corpus, in the exact ratio of hops."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.errors import DataError
from data.hop_ratio import assign_hops, largest_remainder, prompts_file
from data.links import MEASURED
from data.parquet_io import training_row, write_training_rows
from data.prose import prose_share, without_lead_in
from data.spread import spread
from search.indexing.boundaries import Boundaries
from search.indexing.chunking import document_of
from search.sources.corpus import Some
from verl_ext.method.passages import defuse
from verl_ext.method.prompts import MAX_TURNS, PromptForm, challenger_messages

Document = tuple[str, str, str]  # id, title, text
_CHARACTERS = 16  # characters per token. Only this much of a text is tokenized


@dataclass(frozen=True)
class PrepareReport:
    """`cycles`: training rows per training document. `wanted_hops`: the ratio's exact counts."""

    train_path: Path
    heldout_path: Path | None
    hop_counts: dict[int, int]
    wanted_hops: dict[int, int]
    corpus_documents: int
    read_documents: int
    short: Some
    unsaid: Some
    repeated: Some
    train_documents: int
    heldout_documents: int
    cut_documents: Some
    cycles: float
    heldout_is_disjoint: bool

    def summary(self) -> str:
        """Return one line for the console."""
        parts = [
            f"{sum(self.hop_counts.values())} ({in_words(self.hop_counts)}) about {self.train_documents} of "
            f"{self.corpus_documents} documents in {self.train_path}"
        ]
        if self.heldout_path:
            parts.append(f"{self.heldout_documents} held-out documents in {self.heldout_path.name}")
        if self.cycles > 1:
            parts.append(f"the corpus has fewer documents than rows: cycled {self.cycles:.2f} times")
        if not self.heldout_is_disjoint:
            parts.append("the corpus is too small for separate held-out documents: they are trained on too")
        return "; ".join(parts)


def in_words(hops: Mapping[int, int]) -> str:
    """Return the rows of each hop count in words."""
    return ", ".join(f"{count} of {hop} hop{'s' * (hop != 1)}" for hop, count in hops.items())


def prepare_challenger_prompts(
    documents: Iterable[Document],
    *,
    rows: int,
    hop_ratio: Sequence[int] = (4, 3, 2, 1),
    tokenizer: Tokenizer,
    min_document_tokens: int = 0,
    min_prose: float = 0.0,
    max_document_tokens: int = 256,
    chains: Mapping[str, int] | None = None,
    prompt_form: PromptForm,
    max_turns: int = MAX_TURNS,
    heldout_rows: int,
    seed: int,
    corpus_id: str,
    out_dir: Path,
    drawn_from: int | None = None,
) -> PrepareReport:
    """Write `zero_ratio4321.parquet` and `zero_ratio4321_heldout.parquet` (with the ratio in the name).

    `tokenizer` is the one that split the corpus, so chunks are shown whole. `chains` (`data.links`) limit
    a document's hops. `drawn_from` is the size of a corpus in random order, read only as far as needed.
    Raises DataError, before writing, if no document is long enough or the ratio is invalid.
    """
    hop_counts = largest_remainder(rows, hop_ratio)
    drawn = _Drawn(tokenizer, min_document_tokens, min_prose, random.Random(f"{seed}/documents"))
    size = rows + heldout_rows
    sample = drawn.sample(documents, size if drawn_from else max(size, MEASURED), drawn_from is not None)
    if not sample:
        raise DataError(
            f"the corpus {corpus_id!r} has no document to ask about: of {drawn.seen} that are not held out, "
            f"{drawn.short.count} have fewer than {max(min_document_tokens, 1)} tokens (min_document_tokens) "
            f"and {drawn.unsaid.count} less than {min_prose:.0%} of their text in sentences (min_prose). "
            "Index longer texts, or set the limit that refuses them lower"
        )

    disjoint = len(sample) >= size or 2 * heldout_rows <= len(sample)
    heldout_counts = largest_remainder(heldout_rows, hop_ratio)
    heldout, others = _choose(sample, heldout_counts, chains)
    train, _ = _choose(others if disjoint else sample, hop_counts, chains)
    make = _RowMaker(tokenizer, max_document_tokens, chains, prompt_form, max_turns, seed, corpus_id)
    train_rows = make.rows(train, hop_counts, "train")
    heldout_table = make.rows(heldout, heldout_counts, "heldout")

    train_path = out_dir / prompts_file(hop_ratio)
    heldout_path = train_path.with_stem(f"{train_path.stem}_heldout")
    write_training_rows(train_path, train_rows)
    if heldout_table:
        write_training_rows(heldout_path, heldout_table)
    given = [row["extra_info"]["hop"] for row in train_rows]
    return PrepareReport(
        train_path=train_path,
        heldout_path=heldout_path if heldout_table else None,
        hop_counts={hop: given.count(hop) for hop in range(1, len(hop_counts) + 1)},
        wanted_hops=dict(enumerate(hop_counts, start=1)),
        corpus_documents=drawn.seen if drawn_from is None else drawn_from,
        read_documents=drawn.seen,
        short=drawn.short,
        unsaid=drawn.unsaid,
        repeated=drawn.repeated,
        train_documents=len(train),
        heldout_documents=len(heldout),
        cut_documents=make.cut,
        cycles=rows / len(train),
        heldout_is_disjoint=disjoint,
    )


def cut_to_tokens(text: str, tokenizer: Tokenizer, limit: int) -> str:
    """Return a beginning of at most `limit` tokens, cut after a sentence if one fits, else between words."""
    if limit < 1:
        return ""
    # Do not tokenize a whole book for its first page.
    most = min(len(text), limit * _CHARACTERS)
    offsets = tokenizer.encode(text[:most], add_special_tokens=False).offsets
    if most == len(text) and len(offsets) <= limit:
        return text
    boundaries = Boundaries(text[: most + 8], markdown=False)
    end = offsets[limit][0] if limit < len(offsets) else most
    while end > 0:
        end = boundaries.cut(0, end, lambda part: False).place if end > 1 else end
        # Cutting a word may give the beginning more tokens than it had within the text.
        if len(tokenizer.encode(text[:end], add_special_tokens=False).ids) <= limit:
            return text[:end].rstrip()
        end -= 1
    return ""


def _choose(
    documents: list[Document], hop_counts: list[int], chains: Mapping[str, int] | None
) -> tuple[list[Document], list[Document]]:
    """Split off a document for each row, the first ones whose chains carry the most hops wanted."""
    taken: set[int] = set()
    missing = 0
    for hop in range(len(hop_counts), 0, -1):
        missing += hop_counts[hop - 1]
        able = (
            place
            for place, (doc_id, _, _) in enumerate(documents)
            if place not in taken and (chains is None or chains.get(doc_id, 1) >= hop)
        )
        some = list(islice(able, missing))
        taken.update(some)
        missing -= len(some)
    chosen = [document for place, document in enumerate(documents) if place in taken]
    return chosen, [document for place, document in enumerate(documents) if place not in taken]


class _Drawn:
    """A uniform sample of suitable documents, and counts of the others."""

    def __init__(self, tokenizer: Tokenizer, least: int, prose: float, rng: random.Random) -> None:
        self._tokenizer, self._least, self._prose, self._rng = tokenizer, least, prose, rng
        self.seen = 0
        self.short, self.unsaid, self.repeated = Some(), Some(), Some()

    def sample(self, documents: Iterable[Document], size: int, in_random_order: bool) -> list[Document]:
        """Draw in random order: the first of documents in random order, else a reservoir, spread over all."""
        fit = self._fit(documents)
        if in_random_order:
            return list(islice(self._unlike(fit), size))
        reservoir: list[Document] = []
        for number, document in enumerate(fit, start=1):
            if len(reservoir) < size:
                reservoir.append(document)
            elif (place := self._rng.randrange(number)) < size:
                reservoir[place] = document
        self._rng.shuffle(reservoir)
        # Another chunk of a document comes after one of each.
        return spread(self._unlike(reservoir), lambda document: document_of(document[0]))

    def _fit(self, documents: Iterable[Document]) -> Iterator[Document]:
        for doc_id, title, text in documents:
            self.seen += 1
            document = doc_id, title, without_lead_in(text)
            if self._is_fit(document):
                yield document

    def _is_fit(self, document: Document) -> bool:
        _, title, text = document
        shown = f"{title}\n{text}".strip()
        # Each token has a letter, so length alone shows that most documents are long enough.
        tokens = self._least
        if not text.strip():
            tokens = -1
        elif len(text) < self._least * _CHARACTERS:
            tokens = len(self._tokenizer.encode(shown, add_special_tokens=False).ids)
        if tokens < self._least:
            self.short.add(shown)
            return False
        if prose_share(text, self._prose) < self._prose:
            self.unsaid.add(shown)
            return False
        return True

    def _unlike(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Skip documents with the same words as an earlier one."""
        known: set[str] = set()
        for document in documents:
            words = " ".join(document[2].split())
            if words in known:
                self.repeated.add(f"{document[1]}: {words}")
            else:
                known.add(words)
                yield document


@dataclass
class _RowMaker:
    """Turns documents into training rows. `cut` counts documents that were too long."""

    tokenizer: Tokenizer
    max_tokens: int
    chains: Mapping[str, int] | None
    form: PromptForm
    max_turns: int
    seed: int
    corpus_id: str
    cut: Some = field(default_factory=Some)

    def rows(self, documents: list[Document], hop_counts: list[int], split: str) -> list[dict[str, Any]]:
        """Return `hop_counts[i]` rows of i + 1 hops. Documents repeat in a new order each time."""
        hops = [hop for hop, count in enumerate(hop_counts, start=1) for _ in range(count)]
        random.Random(f"{self.seed}/{split}/hops").shuffle(hops)
        shown = []
        for doc_id, title, text in documents[: len(hops)]:
            whole = defuse(f"{title}\n{text}".strip())
            shown.append((doc_id, cut_to_tokens(whole, self.tokenizer, self.max_tokens)))
            if shown[-1][1] != whole:
                self.cut.add(f"… {shown[-1][1][-60:]}")
        rng = random.Random(f"{self.seed}/{split}/cycles")
        order: list[tuple[str, str]] = []
        while len(order) < len(hops):
            order += rng.sample(shown, len(shown))
        if self.chains is not None:
            hops = assign_hops(hops, [self.chains.get(doc_id, 1) for doc_id, _ in order], rng)
        metadata = {
            "corpus_id": self.corpus_id,
            "generator_checkpoint": None,
            "seed": self.seed,
            "trajectory": None,
        }
        rows = []
        for index, (hop, (doc_id, document)) in enumerate(zip(hops, order, strict=False)):
            messages = challenger_messages(document, hop, self.form, self.max_turns)
            extra = {"index": index, "split": split, "hop": hop, "doc_id": doc_id, "document": document}
            rows.append(
                training_row(f"search_zero_{hop}", messages, None, extra | {"question": None}, metadata)
            )
        return rows
