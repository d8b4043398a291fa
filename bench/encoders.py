"""Runtimes for an embedding model on a CPU, compared: torch in several ways, ONNX Runtime, OpenVINO.

    OMP_NUM_THREADS=1 python -m bench.encoders                      # all, into bench/README.md (5 minutes)
    OMP_NUM_THREADS=1 python -m bench.encoders --seconds 1 --dry

Queries are those of bench/retrieval.py, in batches of 1 to 64, one thread. Every runtime gets the tokens of
the same tokenizer and pads to the longest of the batch; time is CPU time per query, tokenizing included, the
best of the rounds. Each round runs all runtimes, so that a slow moment of the machine affects them all. The
quality of a runtime's vectors has two measures: the lowest cosine with float32's for the same query, and
recall@3 over passages in float32 by exact search, with float32's own answer as the truth.

sentence-transformers' backends `onnx` and `openvino` depend on optimum, which requires other versions of
torch and transformers than this project's. So the model is exported here by torch and run by the runtimes
themselves, which is what those backends do. Needs onnx, onnxscript, onnxruntime and openvino; runtimes that
are not installed are skipped.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from bench.gates import replace_section
from bench.machine import machine
from bench.model import load_model, model_folder
from bench.retrieval_world import Queries
from data.demo_world import generate_world
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec
from search.stored_index import passage_text

README = Path(__file__).parent / "README.md"
TITLE = "## Encoders"
BATCHES = (1, 8, 32, 64)
COMPARED = 512
PASSAGES = 2000
ROUNDS = 3
PACKAGES = ("torch", "transformers", "sentence-transformers", "onnxruntime", "openvino")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Encode = Callable[[list[str]], np.ndarray]
"""Unit vectors of a batch of queries."""


@dataclass(frozen=True)
class Runtime:
    """One way to run the model."""

    name: str
    encode: Encode


class Exported(torch.nn.Module):
    """The whole sentence-transformers model, pooling included, as a function of tensors."""

    def __init__(self, model: SentenceTransformer, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the vectors of a batch of tokens."""
        features: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        return self.model(features | {"modality": "text"})["sentence_embedding"]


def export_onnx(model: SentenceTransformer, path: Path) -> list[str]:
    """Write the model as ONNX with free batch and length; return the names of its inputs."""
    features = model.preprocess(["one query", "another and longer query"], prompt="")
    inputs = [name for name in INPUTS if name in features]
    free = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("tokens", min=3, max=512)}
    program = torch.onnx.export(
        Exported(model, inputs).eval(),
        tuple(features[name] for name in inputs),
        dynamo=True,
        input_names=inputs,
        output_names=["vectors"],
        dynamic_shapes=((free,) * len(inputs),),
        verbose=False,
    )
    assert program is not None
    program.save(str(path))
    return inputs


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _sentence_transformers(embedder: str) -> Encode:
    model, prefix = load_model(embedder)
    return lambda texts: model.encode(
        texts, prompt=prefix, normalize_embeddings=True, show_progress_bar=False, batch_size=64
    )


def _own(embedder: str, dtype: str | None = None) -> Encode:
    own = Embedder(EmbedderSpec(embedder, "cpu", dtype))
    own.load()
    return own.encode_queries


def _eager(embedder: str) -> Encode:
    folder = model_folder(embedder)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"attn_implementation": "eager"})
    prefix = Embedder(EmbedderSpec(embedder)).prefixes.query
    return lambda texts: model.encode(
        texts, prompt=prefix, normalize_embeddings=True, show_progress_bar=False, batch_size=64
    )


def _onnxruntime(path: Path, inputs: Sequence[str], tokens: Callable[[list[str]], dict[str, Any]]) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> np.ndarray:
        features = tokens(texts)
        return _unit(session.run(None, {name: features[name].numpy() for name in inputs})[0])

    return encode


def _openvino(
    path: Path, inputs: Sequence[str], tokens: Callable[[list[str]], dict[str, Any]], precision: str
) -> Encode:
    import openvino

    # By default OpenVINO computes in bfloat16 if the processor can; here it is set.
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1}
    request = openvino.Core().compile_model(str(path), "CPU", options).create_infer_request()

    def encode(texts: list[str]) -> np.ndarray:
        features = tokens(texts)
        found = request.infer({name: features[name].numpy() for name in inputs})
        return _unit(np.array(next(iter(found.values())), dtype=np.float32))

    return encode


def runtimes(embedder: str, folder: Path) -> Iterator[Runtime]:
    """Yield the installed runtimes; the first is the reference."""
    yield Runtime("sentence-transformers, `encode`", _sentence_transformers(embedder))
    yield Runtime("sentence-transformers, `encode`, eager attention", _eager(embedder))
    yield Runtime("`search.embedders`, float32", _own(embedder))
    yield Runtime("`search.embedders`, bfloat16", _own(embedder, "bfloat16"))
    if not _installed("onnx", "onnxscript"):
        return
    model, prefix = load_model(embedder)
    path = folder / "model.onnx"
    inputs = export_onnx(model, path)

    def tokens(texts: list[str]) -> dict[str, Any]:
        return model.preprocess(texts, prompt=prefix)

    if _installed("onnxruntime"):
        yield Runtime("ONNX Runtime, float32", _onnxruntime(path, inputs, tokens))
        yield Runtime("ONNX Runtime, dynamic int8", _onnxruntime(_quantised(path), inputs, tokens))
    if _installed("openvino"):
        yield Runtime("OpenVINO, float32", _openvino(path, inputs, tokens, "f32"))
        yield Runtime("OpenVINO, bfloat16", _openvino(path, inputs, tokens, "bf16"))


def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


def _quantised(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    to = path.with_name("int8.onnx")
    quantize_dynamic(path, to, weight_type=QuantType.QInt8)
    return to


def cpu_ms(encode: Encode, queries: list[str], batch: int, seconds: float) -> float:
    """Return CPU milliseconds per query in batches of one size, measured for about `seconds`."""
    done, begun, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end or not done:
        start = done % (len(queries) - batch + 1)
        encode(queries[start : start + batch])
        done += batch
    return 1000 * (time.process_time() - begun) / done


def recall_at_3(vectors: np.ndarray, reference: np.ndarray, passages: np.ndarray) -> float:
    """Return the share of the three nearest passages by the reference's vectors that these find too."""
    ours, theirs = (np.argsort(-(rows @ passages.T), axis=1)[:, :3] for rows in (vectors, reference))
    return float(np.mean([len(set(a) & set(b)) / 3 for a, b in zip(ours, theirs, strict=True)]))


def measure(embedder: str, seconds: float) -> str:
    """Measure all runtimes; return the section's table."""
    world = generate_world(0, "run", passages=PASSAGES, chains_per_hop=0)
    queries = Queries.of(world, 0).texts
    texts = [passage_text(passage.title, passage.text) for passage in world.passages.values()]
    passages = Embedder(EmbedderSpec(embedder, "cpu")).encode_passages(texts)
    with tempfile.TemporaryDirectory() as folder:
        found = list(runtimes(embedder, Path(folder)))
        vectors = [np.concatenate([run.encode(part) for part in _parts(queries)]) for run in found]
        best = {(run.name, batch): float("inf") for run in found for batch in BATCHES}
        for _ in range(ROUNDS):
            for batch in BATCHES:
                for run in found:
                    cost = cpu_ms(run.encode, queries[COMPARED:], batch, seconds / ROUNDS)
                    best[run.name, batch] = min(best[run.name, batch], cost)
    sizes = " | ".join(f"batch {batch}, ms" for batch in BATCHES)
    lines = [
        f"| runtime | {sizes} | least cosine | recall@3 |",
        "|---" * (len(BATCHES) + 3) + "|",
    ]
    for run, rows in zip(found, vectors, strict=True):
        costs = " | ".join(f"{best[run.name, batch]:.2f}" for batch in BATCHES)
        cosine = float((rows * vectors[0]).sum(axis=1).min())
        lines.append(
            f"| {run.name} | {costs} | {cosine:.5f} | {recall_at_3(rows, vectors[0], passages):.4f} |"
        )
    return "\n".join(lines)


def _parts(queries: list[str]) -> Iterator[list[str]]:
    for start in range(0, COMPARED, 64):
        yield queries[start : start + 64]


def two_threads(embedder: str, seconds: float) -> str:
    """Return a sentence about a second torch thread, in wall time, since it takes a second core."""
    encode = _own(embedder)
    queries = ["In which town was the author of The Falbush Lamp born?"] * max(BATCHES)
    figures = []
    for batch in (1, 64):
        walls = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            encode(queries[:batch])
            done, begun = 0, time.monotonic()
            while time.monotonic() < begun + seconds or not done:
                encode(queries[:batch])
                done += batch
            walls.append(1000 * (time.monotonic() - begun) / done)
        figures.append(f"{walls[0]:.2f} and {walls[1]:.2f} at batch {batch}")
    torch.set_num_threads(1)
    return f"Wall ms per query of `search.embedders` with one and two torch threads: {', '.join(figures)}."


def main() -> None:
    """Measure, print, and write the section to bench/README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--embedder", default=PACKAGED_EMBEDDER)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each runtime and batch size")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = measure(args.embedder, args.seconds)
    about = (
        f"`OMP_NUM_THREADS=1 python -m bench.encoders`: {machine(*PACKAGES)}; {args.embedder}, one thread. "
        f"CPU milliseconds per query, best of {ROUNDS} rounds; least cosine with the first line's vectors "
        f"over {COMPARED} queries, and recall@3 against it over {PASSAGES:,} passages."
    )
    section = "\n\n".join([about, table, two_threads(args.embedder, args.seconds / 4)])
    print(section)
    if not args.dry:
        text = README.read_text(encoding="utf-8")
        README.write_text(replace_section(text, TITLE, f"{section}\n\n{DECISION}"), encoding="utf-8")


DECISION = (
    "A batch as it comes is padded to its longest query and leaves the processor's cache; "
    "`search/embedders.py` sorts by length and computes 16 at a time. It runs torch in float32 on a CPU, "
    "through the model's own modules. The exported runtimes answer a single query in half the time and a "
    "full batch no faster, and a loaded server sends full batches; they would need a conversion of each "
    "model, a second set of weights on disk, and packages that hold back torch and transformers "
    "(optimum). bfloat16 is 2.7 times as fast at batch 64 on this processor, which multiplies it, and "
    "emulated on others; it costs half a percent of recall and would let results depend on the machine. "
    "On a GPU it is the standard."
)


if __name__ == "__main__":
    main()
