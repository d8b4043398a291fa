"""Challenger prompts from a corpus: the training file of the challenger and its held-out split.

Every row asks for one question of h hops that starts from one document. Documents are a uniform sample of
the corpus, drawn in one pass over it, so the corpus may be larger than memory. Hops come in the exact ratio
asked for (paper: 4:3:2:1) and in random order. The same documents, tokenizer, settings and seed give the
same bytes.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.parquet_io import ABILITY, AGENT_NAME, write_training_rows
from data.ratios import largest_remainder
from verl_ext.method.passages import defuse
from verl_ext.method.prompts import MAX_TURNS, PromptForm, challenger_messages

Document = tuple[str, str, str]  # id, title, text
LONGEST_FRAGMENT = 40  # characters of a cut word that are dropped to end a document on a whole word


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare_challenger_prompts` wrote.

    `cycles` is how often the training rows go through their documents (1.0 or less: no document twice).
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
        """A few plain lines for a person."""
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
    tokens of `tokenizer`. Held-out documents are set apart first, unless that would take more than half of
    the corpus. With `heldout_rows` 0 there is no held-out file.

    Raises:
        DataError: no document with text, or a row count or ratio without sense; nothing is written then.
    """
    if rows < 1 or heldout_rows < 0:
        raise DataError(
            f"need at least 1 training row and no negative held-out count: {rows}, {heldout_rows}"
        )
    hop_counts = largest_remainder(rows, hop_ratio)
    sample, seen, blank = _sample(documents, rows + heldout_rows, random.Random(f"{seed}/documents"))
    if not sample:
        raise DataError(f"the corpus {corpus_id!r} has no document with text: nothing to ask questions about")

    disjoint = len(sample) == rows + heldout_rows or 2 * heldout_rows <= len(sample)
    heldout, train = sample[:heldout_rows], sample[heldout_rows:] if disjoint else sample
    make = _RowMaker(tokenizer, max_document_tokens, prompt_form, max_turns, seed, corpus_id)
    train_rows = make.rows(train, hop_counts, "train")
    heldout_table = make.rows(heldout, largest_remainder(heldout_rows, hop_ratio), "heldout")

    stem = f"zero_ratio{_ratio_name(hop_ratio)}"
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


def cut_to_tokens(text: str, tokenizer: Any, limit: int) -> str:
    """The longest beginning of `text` of at most `limit` tokens (special tokens not counted), by bisection.

    The cut falls between characters of the text itself, never inside a character's bytes, and between words
    where that costs little.
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
    return (
        text[:word_end]
        if word_end > 0 and low - word_end <= LONGEST_FRAGMENT and fits(word_end)
        else text[:low]
    )


def _sample(documents: Iterable[Document], size: int, rng: random.Random) -> tuple[list[Document], int, int]:
    """A uniform sample in random order (reservoir sampling), how many were seen, how many blank."""
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


def _ratio_name(ratio: Sequence[int]) -> str:
    """`4321`, or `10-3-1` where plain digits would be ambiguous."""
    return ("" if max(ratio) < 10 else "-").join(map(str, ratio))


class _RowMaker:
    """Turns documents into training rows; counts in `cut` the documents that were too long."""

    def __init__(
        self, tokenizer: Any, max_tokens: int, form: PromptForm, max_turns: int, seed: int, corpus_id: str
    ) -> None:
        self.tokenizer, self.max_tokens, self.form, self.max_turns = tokenizer, max_tokens, form, max_turns
        self.seed, self.corpus_id = seed, corpus_id
        self.cut = 0

    def rows(self, documents: list[Document], hop_counts: list[int], split: str) -> list[dict[str, Any]]:
        """One row for each hop of `hop_counts`, documents cycled and reshuffled on each cycle."""
        hops = [hop for hop, count in enumerate(hop_counts, start=1) for _ in range(count)]
        random.Random(f"{self.seed}/{split}/hops").shuffle(hops)
        shown = [(doc_id, self._shown(title, text)) for doc_id, title, text in documents[: len(hops)]]
        rng = random.Random(f"{self.seed}/{split}/cycles")
        order: list[tuple[str, str]] = []
        while len(order) < len(hops):
            order += rng.sample(shown, len(shown))
        pairs = zip(hops, order, strict=False)
        return [self._row(index, split, hop, *document) for index, (hop, document) in enumerate(pairs)]

    def _shown(self, title: str, text: str) -> str:
        whole = defuse(f"{title}\n{text}".strip())
        shown = cut_to_tokens(whole, self.tokenizer, self.max_tokens)
        self.cut += shown != whole
        return shown

    def _row(self, index: int, split: str, hop: int, doc_id: str, document: str) -> dict[str, Any]:
        source = f"search_zero_{hop}"
        return {
            "data_source": source,
            "prompt": challenger_messages(document, hop, self.form, self.max_turns),
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": {"target": None}},
            "extra_info": {
                "index": index,
                "split": split,
                "hop": hop,
                "doc_id": doc_id,
                "document": document,
                "question": None,
                "need_tools_kwargs": True,
                "tools_kwargs": {"search": {"create_kwargs": {"data_source": source}}},
            },
            "agent_name": AGENT_NAME,
            "metadata": {
                "corpus_id": self.corpus_id,
                "document_sha256": sha256(document.encode()).hexdigest(),
                "generator_checkpoint": None,
                "seed": self.seed,
                "trajectory": None,
            },
        }
