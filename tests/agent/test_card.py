"""The model card: figures that reports hold, licences as stated, and hostile names as text."""

import json
import string
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from omegaconf import OmegaConf

from drzero.agent.bundle.manifest import FORM, Manifest
from drzero.agent.card.card import as_text, write_card
from drzero.recipe.fingerprint import fingerprint_model
from drzero.stages.evaluate.benchmark_scores import score_all
from search.index_info import ServedIndex

MARKUP = "<img src=x onerror=alert(1)> | ![x](http://evil) [y](javascript:z) `a` **b** $c$"
HOSTILE = f"{MARKUP}\n# d \x1b[31m \u202e & &lt;"
AS_TEXT = f"{MARKUP} # d ␛[31m ⟨U+202E⟩ & &lt;"
INDEX = ServedIndex("corpus", "intfloat/e5-base-v2", "rev", "docs", 1200, 3400)
MARKDOWN = MarkdownIt("gfm-like", {"html": True, "linkify": False})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def make_card(tmp_path, model):
    def make(iteration: int | None = 2, base_model: str = "org/base", **stated: object) -> str:
        about = {"licence": None, "corpus_licence": None, "datasets": [], "push": None} | stated
        config = OmegaConf.create({**about, "paths": {"checkpoints": str(tmp_path)}})
        settings = {"prompts.form": "full", "retrieval.topk": 3}
        manifest = Manifest(FORM, iteration, base_model, settings, {}, INDEX, {"torch": "2.0"}, {})
        write_card(tmp_path / "README.md", config, manifest, model)
        return (tmp_path / "README.md").read_text()

    return make


@pytest.fixture
def evaluate(tmp_path):
    def leave(name: str, model: str, rights: dict[str, list[int]], index: str = INDEX.fingerprint) -> dict:
        records = [record(benchmark, bool(one)) for benchmark, all_of in rights.items() for one in all_of]
        scores, averages = score_all(records, {}, list(rights))
        report = {
            "conditions": {"model": model, "collection": index},
            "benchmarks": {benchmark: asdict(row) for benchmark, row in scores.items()},
            "averages": {benchmark: asdict(row) for benchmark, row in averages.items()},
        }
        leave_run(tmp_path / name, report)
        return report["benchmarks"] | report["averages"]

    return leave


def record(benchmark: str, right: bool) -> dict:
    counts = dict.fromkeys(("searches", "truncated_turns", "turns", "invalid_calls", "calls"), 1)
    return {"benchmark": benchmark, "right": right, "f1": float(right), **counts}


def leave_run(folder: Path, report: dict) -> None:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    for name in ("result.json", "answers.jsonl"):
        (folder / name).write_text("{}")


def tables(card: str) -> dict[str, list[list[str]]]:
    """The cells of each table as a reader sees them, by the heading above it."""
    found, heading, tokens = {}, "", MARKDOWN.parse(body(card))
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "inline":
            continue
        if before.type == "heading_open":
            heading = shown(token)
        elif before.type in ("th_open", "td_open"):
            rows = found.setdefault(heading, [])
            rows += [[]] if before.type == "th_open" and not rows else []
            if before.type == "td_open" and len(rows[-1]) == len(rows[0]):
                rows.append([])
            rows[-1].append(shown(token))
    return found


def shown(token) -> str:
    return "".join(child.content for child in token.children)


def body(card: str) -> str:
    return card.split("\n---\n", 1)[1]


def digits(row: dict) -> list[str]:
    number = "{:.3f}".format
    between = f"{number(row['em_low'])} to {number(row['em_high'])}"
    return [str(row["n"]), number(row["em"]), between, number(row["f1"]), number(row["searches"]), "0"]


def test_the_scores_are_the_reports_by_iteration_and_benchmark(make_card, evaluate, model):
    own = fingerprint_model(str(model))
    reports = {
        "base model": evaluate("evaluate_iter0", "a", {"nq": [0, 0, 1], "popqa": [0, 1]}),
        "iteration 1": evaluate("evaluate_iter1", "b", {"nq": [0, 1, 1], "popqa": [0, 1]}),
        "this model": evaluate("evaluate_iter2", own, {"nq": [1, 1, 1], "popqa": [1, 1]}),
    }
    card = make_card()
    expected = [
        [name, benchmark, *digits(row)] for name, rows in reports.items() for benchmark, row in rows.items()
    ]
    assert tables(card)["Scores"][1:] == expected
    assert "No evaluation" not in card


def test_an_evaluation_of_other_weights_is_left_out_and_one_on_another_index_is_marked(
    make_card, evaluate, model
):
    evaluate("evaluate_iter2", "trained again since", {"nq": [1]})
    assert "nq" not in (card := make_card()) and "No evaluation of this model was found" in card
    row = evaluate("exam", fingerprint_model(str(model)), {"exam": [1, 0]}, index="other@rev")["exam"]
    assert tables(make_card())["Scores"][1:] == [["this model (another index)", "exam", *digits(row)]]


def test_a_later_iteration_and_an_unfinished_evaluation_are_no_figures_of_this_model(
    make_card, evaluate, tmp_path
):
    evaluate("evaluate_iter3", "later", {"nq": [1]})
    evaluate("evaluate_iter0", "base", {"popqa": [1]})
    (tmp_path / "evaluate_iter0" / "result.json").unlink()
    assert "Scores" not in tables(make_card())


def test_the_data_made_and_refused_is_the_synthesize_reports(make_card, tmp_path):
    counts = {"prompts": 40, "samples": 200, "pairs": 150, "accepted": 30, "rejected": 10, "train_rows": 27}
    gates = {"evidence": {"judged": 150, "refused": 12}, "hops": {"judged": 150, "refused": 0}}
    leave_run(tmp_path / "synthesize_iter1", counts | {"gates": gates})
    made = tables(make_card())["Training questions"]
    assert made[1:] == [["1", "40", "200", "150", "30", "10", "27", "evidence 12"]]
    assert "Training questions" not in tables(make_card(iteration=None))


@pytest.mark.parametrize(
    "stated, front, said",
    [
        ({}, {}, ["Base model (org/base): not stated", "Corpus: not stated"]),
        ({"licence": "apache-2.0"}, {"license": "apache-2.0"}, ["Base model (org/base): apache-2.0."]),
        (
            {"licence": "Our Own: v1", "corpus_licence": "internal use"},
            {"license": "other", "license_name": "Our Own: v1"},
            ["Base model (org/base): Our Own: v1.", "Corpus: internal use."],
        ),
        ({"datasets": ["org/wiki"]}, {"datasets": ["org/wiki"]}, []),
    ],
)
def test_licences_and_data_sets_are_as_stated_and_missing_ones_are_said_to_be(make_card, stated, front, said):
    card = make_card(**stated)
    found = yaml.safe_load(card.split("---\n")[1])
    assert found.pop("tags") and found == {"base_model": "org/base", **front}
    text = " ".join(shown(token) for token in MARKDOWN.parse(body(card)) if token.type == "inline")
    assert all(one in text for one in said)


def test_a_folders_name_is_no_base_model_of_the_hub(make_card):
    assert "base_model" not in yaml.safe_load(make_card(base_model="my-model").split("---\n")[1])


def test_hostile_names_stay_text_in_the_card(make_card, evaluate, model):
    rows = evaluate("exam", fingerprint_model(str(model)), {HOSTILE: [1]})
    card = make_card(base_model=HOSTILE, licence=HOSTILE, corpus_licence=HOSTILE, datasets=[HOSTILE])
    tokens = MARKDOWN.parse(body(card))
    kinds = {child.type for token in tokens for child in (token, *(token.children or ()))}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "strong_open"}
    assert [row[1] for row in tables(card)["Scores"][1:]] == [AS_TEXT] * len(rows)
    assert yaml.safe_load(card.split("---\n")[1])["license_name"] == AS_TEXT
    assert "\x1b" not in card and "\u202e" not in card


@given(st.text(st.sampled_from(string.ascii_letters + string.punctuation), min_size=1))
def test_any_text_reads_as_itself_in_a_table(text):
    (_, cell) = tables(f"---\n\n---\n| a |\n|---|\n| x{as_text(text)}x |\n")[""]
    assert cell == [f"x{text}x"]
