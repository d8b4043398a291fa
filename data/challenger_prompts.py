"""Challenger prompts from a corpus: the challenger's training file and its held-out split.

    drzero prepare-data source=papers.jsonl model=qwen2.5-3b

Each row asks for one question of h hops that starts from one document. Documents are a uniform sample of the
corpus, drawn in one pass, so the corpus may be larger than memory. Hop counts keep the configured ratio
exactly (paper: 4:3:2:1) and come in random order. The same documents, tokenizer, settings and seed give the
same bytes.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.parquet_io import training_row, write_training_rows
from verl_ext.method.passages import defuse
from verl_ext.method.prompts import MAX_TURNS, PromptForm, challenger_messages

Document = tuple[str, str, str]  # id, title, text
LONGEST_FRAGMENT = 40
"""A cut document ends on a whole word where that drops at most this many characters."""


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare_challenger_prompts` wrote.

    `cycles` is training rows per training document (1.0 or less: no document is used twice).
    """

    train_path: Path
    heldout_path: Path | None
    hop_counts: dict[int, int]
    corpus_documents: int
    blank_documents: int
    train_documents: int
    heldout_documents: int
    cut_documents: int
    cycles: float
    heldout_is_disjoint: bool

    def summary(self) -> str:
        """A few lines for the console."""
        hops = ", ".join(f"{count} of {hop} hops" for hop, count in self.hop_counts.items())
        lines = [f"{sum(self.hop_counts.values())} challenger prompts ({hops}) in {self.train_path}"]
        if self.heldout_path:
            lines.append(f"{self.heldout_documents} held-out documents in {self.heldout_path}")
        lines.append(
            f"corpus: {self.corpus_documents} documents, {self.train_documents} used for training, "
            f"{self.cut_documents} cut to the token limit, {self.blank_documents} left out as blank"
        )
        if self.cycles > 1:
            lines.append(f"the corpus is smaller than the rows asked for: cycled {self.cycles:.2f} times")
        if not self.heldout_is_disjoint:
            lines.append("the corpus is too small for held-out documents of its own: they are trained on too")
        return "\n".join(lines)


def prepare_challenger_prompts(
    documents: Iterable[Document],
    *,
    rows: int,
    hop_ratio: Sequence[int] = (4, 3, 2, 1),
    tokenizer: Any,
    max_document_tokens: int = 256,
    prompt_form: PromptForm,
    max_turns: int = MAX_TURNS,
    heldout_rows: int,
    seed: int,
    corpus_id: str,
    out_dir: Path,
) -> PrepareReport:
    """Write `zero_ratio4321.parquet` and `zero_ratio4321_heldout.parquet` (the ratio in the name).

    `hop_ratio[i]` is the weight of i + 1 hops. A document is title and text, cut to `max_document_tokens`
    tokens of `tokenizer`. Held-out documents are not trained on, unless they would be more than half of the
    corpus. With `heldout_rows` 0 there is no held-out file.

    Raises:
        DataError: no document has text, or the ratio is invalid; nothing is written then.
    """
    hop_counts = largest_remainder(rows, hop_ratio)
    sample, seen, blank = _sample(documents, rows + heldout_rows, random.Random(f"{seed}/documents"))
    if not sample:
        raise DataError(
            f"the corpus {corpus_id!r} has no document with text that is not held out: nothing to ask about"
        )

    disjoint = len(sample) == rows + heldout_rows or 2 * heldout_rows <= len(sample)
    heldout, train = sample[:heldout_rows], sample[heldout_rows:] if disjoint else sample
    make = _RowMaker(tokenizer, max_document_tokens, prompt_form, max_turns, seed, corpus_id)
    train_rows = make.rows(train, hop_counts, "train")
    heldout_table = make.rows(heldout, largest_remainder(heldout_rows, hop_ratio), "heldout")

    # 4321, or 10-3-1 where plain digits would be ambiguous.
    stem = f"zero_ratio{('' if max(hop_ratio) < 10 else '-').join(map(str, hop_ratio))}"
    train_path, heldout_path = out_dir / f"{stem}.parquet", out_dir / f"{stem}_heldout.parquet"
    write_training_rows(train_path, train_rows)
    if heldout_table:
        write_training_rows(heldout_path, heldout_table)
    return PrepareReport(
        train_path=train_path,
        heldout_path=heldout_path if heldout_table else None,
        hop_counts=dict(enumerate(hop_counts, start=1)),
        corpus_documents=seen,
        blank_documents=blank,
        train_documents=min(rows, len(train)),
        heldout_documents=min(heldout_rows, len(heldout)),
        cut_documents=make.cut,
        cycles=rows / len(train),
        heldout_is_disjoint=disjoint,
    )


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into whole counts in the ratio `weights` (Hamilton's method).

    Each count is its exact share rounded down; the rest goes to the largest remainders, earlier ones first.
    The counts sum to `total`, and each is less than 1 away from its exact share.

    Raises:
        DataError: `total` is negative, a weight is negative or all weights are 0.
    """
    if total < 0 or min(weights, default=-1) < 0 or sum(weights) == 0:
        raise DataError(
            f"cannot split {total} in the ratio {':'.join(map(str, weights)) or '(empty)'}: "
            "nothing may be negative and at least one weight must be positive"
        )
    shares = [Fraction(total * weight, sum(weights)) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def cut_to_tokens(text: str, tokenizer: Any, limit: int) -> str:
    """The longest prefix of `text` of at most `limit` tokens (without special tokens), found by bisection.

    The cut is between characters, never inside a character's bytes, and between words where that costs
    little.
    """

    def fits(end: int) -> bool:
        return len(tokenizer.encode(text[:end], add_special_tokens=False)) <= limit

    if fits(len(text)):
        return text
    low, high = 0, len(text)  # text[:low] fits, text[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    word_end = low if text[low].isspace() else max(text.rfind(" ", 0, low), text.rfind("\n", 0, low))
    is_close = word_end > 0 and low - word_end <= LONGEST_FRAGMENT
    return text[: word_end if is_close and fits(word_end) else low]


def _sample(documents: Iterable[Document], size: int, rng: random.Random) -> tuple[list[Document], int, int]:
    """A uniform sample in random order (reservoir sampling), the number of documents, and of blank ones."""
    reservoir: list[Document] = []
    seen = blank = 0
    for document in documents:
        seen += 1
        if not document[2].strip():
            blank += 1
        elif len(reservoir) < size:
            reservoir.append(document)
        elif (place := rng.randrange(seen - blank)) < size:
            reservoir[place] = document
    rng.shuffle(reservoir)
    return reservoir, seen, blank


class _RowMaker:
    """Turns documents into training rows; `cut` counts the documents that were too long."""

    def __init__(
        self, tokenizer: Any, max_tokens: int, form: PromptForm, max_turns: int, seed: int, corpus_id: str
    ) -> None:
        self.tokenizer, self.max_tokens, self.form, self.max_turns = tokenizer, max_tokens, form, max_turns
        self.seed, self.corpus_id = seed, corpus_id
        self.cut = 0

    def rows(self, documents: list[Document], hop_counts: list[int], split: str) -> list[dict[str, Any]]:
        """`hop_counts[i]` rows of i + 1 hops; documents are cycled, in a new order each time."""
        hops = [hop for hop, count in enumerate(hop_counts, start=1) for _ in range(count)]
        random.Random(f"{self.seed}/{split}/hops").shuffle(hops)
        shown = []
        for doc_id, title, text in documents[: len(hops)]:
            whole = defuse(f"{title}\n{text}".strip())
            shown.append((doc_id, cut_to_tokens(whole, self.tokenizer, self.max_tokens)))
            self.cut += shown[-1][1] != whole
        rng = random.Random(f"{self.seed}/{split}/cycles")
        order: list[tuple[str, str]] = []
        while len(order) < len(hops):
            order += rng.sample(shown, len(shown))
        return [
            training_row(
                f"search_zero_{hop}",
                challenger_messages(document, hop, self.form, self.max_turns),
                None,
                {
                    "index": index,
                    "split": split,
                    "hop": hop,
                    "doc_id": doc_id,
                    "document": document,
                    "question": None,
                },
                {
                    "corpus_id": self.corpus_id,
                    "generator_checkpoint": None,
                    "seed": self.seed,
                    "trajectory": None,
                },
            )
            for index, (hop, (doc_id, document)) in enumerate(zip(hops, order, strict=False))
        ]
