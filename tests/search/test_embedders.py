"""Embedders: the vectors are sentence-transformers' own for any kind of model, alone or in any batch."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_embedder import save_tiny_embedder

from search import embedders
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec, Prefixes, default_dtype

SPEC = EmbedderSpec(PACKAGED_EMBEDDER, "cpu")
TEXTS = [
    "where was Mara Tesk born?",
    "the river",
    "Krando Vilmesh wrote The Zolvan Lamp in the town of Drosken, on the river Galmir. " * 4,
    "Жаңа қала 城市 🌉 naïve",
    "",
]
PROMPT = "search for: "


@pytest.fixture(scope="module")
def packaged():
    return Embedder(SPEC)


def made(folder: Path, *shape: Any, **more: Any) -> tuple[Embedder, SentenceTransformer]:
    """A random model with a prompt for queries, as ours and as the library's."""
    spec = save_tiny_embedder(folder, 0, *shape, prompts={"query": PROMPT, "document": ""}, **more)
    return Embedder(spec), SentenceTransformer(str(folder), device="cpu")


def encoded(model: SentenceTransformer, texts: list[str], prompt: str) -> np.ndarray:
    """The library's own vectors."""
    return model.encode(texts, prompt=prompt, normalize_embeddings=True, show_progress_bar=False)


# --- prefixes ---


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("intfloat/e5-large-v2", Prefixes("query: ", "passage: ")),
        ("intfloat/multilingual-e5-base", Prefixes("query: ", "passage: ")),
        ("BAAI/bge-base-en-v1.5", Prefixes("Represent this sentence for searching relevant passages: ", "")),
        ("nomic-ai/nomic-embed-text-v1.5", Prefixes("search_query: ", "search_document: ")),
        (PACKAGED_EMBEDDER, Prefixes("", "")),
    ],
)
def test_the_standard_embedders_have_the_prefixes_of_their_cards(name, prefixes):
    assert Embedder(EmbedderSpec(name)).prefixes == prefixes


@pytest.mark.parametrize(
    ("own", "prefixes"),
    [
        ({}, Prefixes("query: ", "passage: ")),
        ({"query_prefix": "ask: "}, Prefixes("ask: ", "passage: ")),
        ({"query_prefix": "", "passage_prefix": ""}, Prefixes("", "")),
    ],
)
def test_the_specs_own_prefixes_win(own, prefixes):
    assert Embedder(EmbedderSpec("intfloat/e5-large-v2", **own)).prefixes == prefixes


READ = {
    "Die Sternwarte wurde 1904 von der Astronomin Anna Vell gegründet.": None,
    "Hvězdárnu založila v roce 1904 astronomka, která studovala v Leidenu.": None,
    "f(x) = [i**2 for i in range(10)] # ∑ ≤ → 1904": None,
    "1904, 1905, 1906": None,
    "": None,
    "Обсерватория была основана в 1904 году.": "reads the words letter by letter",
    "Το αστεροσκοπείο ιδρύθηκε το 1904.": "reads the words letter by letter",
    "تأسس المرصد عام 1904 على يد عالمة الفلك.": "reads the words letter by letter",
    "የሥነ ፈለክ ምርምር ተቋሙ በ1904 ተመሠረተ።": "does not know 100% of the letters",
    "หอดูดาวก่อตั้งขึ้นในปี 1904 โดยนักดาราศาสตร์": "does not know 100% of the letters",
    "天文台は1904年に天文学者アンナ・ヴェルによって設立された。": "does not know 12% of the letters",
}


@pytest.mark.parametrize(("text", "fault"), READ.items())
def test_what_the_tokenizer_cannot_read_is_measured(packaged, text, fault):
    reading = packaged.reads([text])
    assert reading.fault == fault and reading.is_hopeless == ("100%" in (fault or ""))


def test_an_e5_model_sees_its_prefixes_before_the_text(tmp_path):
    embedder, model = made(tmp_path / "e5-small-v2")
    queries, passages = encoded(model, ["query: river"], ""), encoded(model, ["passage: river"], "")
    np.testing.assert_allclose(embedder.encode_queries(["river"]), queries, atol=1e-5)
    np.testing.assert_allclose(embedder.encode_passages(["river"]), passages, atol=1e-5)


# --- vectors ---


def test_vectors_are_float32_unit_rows_in_the_order_of_the_texts(packaged, monkeypatch):
    monkeypatch.setattr(embedders, "CPU_BATCH", 2)
    vectors = packaged.encode_queries(TEXTS)
    assert (vectors.dtype, vectors.shape) == (np.float32, (len(TEXTS), 384))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(packaged.encode_queries([text])[0], vector, atol=1e-5)
    assert packaged.encode_passages([]).shape == (0, 384)


def test_the_packaged_model_gives_the_library_s_vectors(packaged):
    model = SentenceTransformer(str(embedders.local_folder(PACKAGED_EMBEDDER)), device="cpu")
    np.testing.assert_allclose(packaged.encode_queries(TEXTS), encoded(model, TEXTS, ""), atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "include_prompt", "dense"),
    [("cls", True, False), ("max", True, False), ("lasttoken", True, False), ("mean", False, True)],
)
def test_other_poolings_and_a_prompt_outside_of_them_give_the_library_s_vectors(
    tmp_path, pooling, include_prompt, dense
):
    embedder, model = made(tmp_path / "model", pooling, include_prompt, dense)
    assert embedder.prefixes == Prefixes(PROMPT, "")
    assert embedder.dimension == (16 if dense else 32)
    np.testing.assert_allclose(embedder.encode_queries(TEXTS), encoded(model, TEXTS, PROMPT), atol=1e-5)


def test_half_precision_gives_unit_vectors_of_almost_the_same_direction_after_a_dense_module_too(tmp_path):
    whole, _ = made(tmp_path / "model", dense=True)
    vectors = Embedder(replace(whole.spec, dtype="bfloat16")).encode_queries(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors * whole.encode_queries(TEXTS)).sum(axis=1).min() > 0.99


# --- revision ---


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    made(folder, dense=True)
    return folder


@pytest.mark.parametrize(
    ("name", "is_another"),
    [
        ("model.safetensors", True),
        ("1_Pooling/config.json", True),
        ("2_Dense/model.safetensors", True),
        ("pytorch_model.bin", False),
        ("onnx/model.bin", False),
        ("README.md", False),
    ],
)
def test_the_revision_changes_with_what_makes_the_vectors_and_with_nothing_else(
    dense_model, tmp_path, name, is_another
):
    copy = Path(shutil.copytree(dense_model, tmp_path / "model"))
    (copy / name).parent.mkdir(exist_ok=True)
    with (copy / name).open("ab") as file:
        file.write(b" ")
    revisions = {Embedder(EmbedderSpec(str(folder))).revision for folder in (dense_model, copy)}
    assert len(revisions) == (2 if is_another else 1)


def test_a_model_has_the_same_revision_in_a_folder_and_in_the_hub_cache(dense_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached, commit = tmp_path / "models--made--up", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(dense_model, cached / "blobs")
    for path in (cached / "blobs").rglob("*.*"):
        link = cached / "snapshots" / commit / path.relative_to(cached / "blobs")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)  # as the hub's cache has them
    names = ("made/up", str(cached / "snapshots" / commit), str(dense_model))
    assert len({Embedder(EmbedderSpec(name)).revision for name in names}) == 1


# --- device and precision ---


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "dtype"),
    [
        ("cpu", True, "float32"),
        ("mps", True, "float32"),
        ("cuda", True, "bfloat16"),
        ("cuda:1", True, "bfloat16"),
        ("cuda", False, "float16"),
    ],
)
def test_precision_follows_from_the_device(device, has_bfloat16, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert default_dtype(device) == dtype
