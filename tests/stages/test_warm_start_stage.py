"""The warm start: which conversations it learns from, and why others are left out; and whole runs of it.

Whole runs are of the second tier. Their teacher plays by a script over real search, and a tiny model learns.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from made_pairs import DOCUMENT, last_turn, prompt, record, search, write_prompts
from omegaconf import OmegaConf
from scripted_endpoint import KEY, MODEL, scripted_endpoint, write_towns
from tiny_model import save_tiny_model

from data.gates import Gates, GateSettings
from data.journal import Journal
from drzero.checkpoints.weights import HfWeights
from drzero.cli import main
from drzero.preflight.demonstrations import Source, read_source, searching_as, searching_as_first
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint
from drzero.recipe.overrides import OverrideError
from drzero.stages.warm_start.card import write_card
from drzero.stages.warm_start.check import by_index
from drzero.stages.warm_start.choose import choose
from drzero.stages.warm_start.training import batch_and_steps, check_learnt, check_same
from verl_ext.method.chat import turn_end_id

ANSWERED = "<think>So it is.</think>\n<answer>Galmir</answer>"


def attempt(*turns, right=True, finished=True):
    said = record(*turns)["trajectory"]
    searches = sum(bool(turn["calls"]) for turn in said["turns"])
    about = {"finished": finished, "right": right, "searches": searches, "tokens_out": 10 * len(turns)}
    return about | {"answer": "Galmir" if right else "Tesk", "failure": None, "trajectory": said}


def tried(*turns, **how):
    return {"attempts": [attempt(*turns, **how)]}


GOOD = [attempt(search(), ANSWERED)]
NAMES = ("Velmar", "Ostrel", "Kestmoor", "Brisfal", "Tolvane", "Aldun", "Mirrow", "Nesk", "Pell", "Quern")


def question(number, name, *, attempts=GOOD, hop=1, turns=None):
    """A prompt about a town, and the record of the question asked about it."""
    document = DOCUMENT.replace("Drosken", name).replace("Galmir", f"{name}bach")
    asked = last_turn(f"On which river does {name} lie?", f"{name}bach")
    row = prompt(number, hop, document, doc_id=name)
    return row, record(*(turns or [asked]), prompt_index=number) | {"attempts": attempts}


def questions(names=NAMES, first=0, **made):
    """One about each town, numbered from `first` on."""
    return [question(number, name, **made) for number, name in enumerate(names, first)]


def source(*made, name="preview"):
    rows, records = (list(part) for part in zip(*made, strict=True))
    return Source(name, "a teacher", {}, rows, records)


@pytest.fixture(scope="module")
def config():
    overrides = ["hardware=cpu", "model=demo-policy", "from=nothing", "held_out_share=0.2"]
    return resolve(compose_stage("warm_start", overrides))


@pytest.fixture
def chosen_from(config, smollm2_tokenizer):
    gates = Gates(GateSettings(near_duplicates=False, contamination=False))
    return lambda *sources: choose(config, sources, smollm2_tokenizer, gates)


def test_a_confirmed_pair_gives_a_conversation_of_each_role_and_documents_are_in_one_split(chosen_from):
    chosen = chosen_from(source(*questions()))
    assert chosen.left_out == []
    assert chosen.counts() == {
        "train": {"challenger": {"1": 8}, "solver": {"1": 8}},
        "held_out": {"challenger": {"1": 2}, "solver": {"1": 2}},
    }
    documents = [{one.doc_id for one in chosen.of(split)} for split in ("train", "held_out")]
    assert documents[0] | documents[1] == set(NAMES) and not documents[0] & documents[1]
    assert {pair.doc_id for _, pair in chosen.held_out_pairs} == documents[1]


def test_only_the_models_own_turns_with_their_ends_are_learnt(chosen_from, smollm2_tokenizer):
    chosen = chosen_from(source(*questions()))
    end = turn_end_id(smollm2_tokenizer)
    for one in chosen.demonstrations:
        ids, own = one.example.ids_T, one.example.own_T
        learnt = smollm2_tokenizer.decode([token for token, is_own in zip(ids, own, strict=True) if is_own])
        said = [turn["text"] for turn in one.trajectory["turns"]]
        assert learnt == "".join(f"{text}<|im_end|>" for text in said)
        assert ids[-1] == end and own[-1] and not own[0]


@pytest.mark.parametrize(
    ("changed", "role", "reason"),
    [
        (tried(search(), "<answer>Tesk</answer>", right=False), "challenger", "nobody confirms"),
        (tried(search(), ANSWERED, finished=False), "solver", "nobody confirms"),
        (tried(ANSWERED), "solver", "the right ones did not search"),
        (tried(search(queries=None, error="no JSON"), ANSWERED), "solver", "a call was not valid"),
        ({"turns": ["<question>Who?</question>"]}, "challenger", "gives no answer"),
        ({"hop": 2}, "challenger", "hops: "),
        (tried(search("x " * 2000), ANSWERED), "solver", "longer than rollout.max_tokens_per_turn=96"),
        (tried(search(), f"<|im_end|>{ANSWERED}"), "solver", "a special token"),
        (tried(replace(search(), text="<function=search>{}"), ANSWERED), "solver", "not written as JSON in"),
    ],
)
def test_what_cannot_be_imitated_is_left_out_with_its_reason(chosen_from, changed, role, reason):
    chosen = chosen_from(source(question(0, NAMES[0], **changed), *questions(NAMES[1:], 1)))
    found = [one for one in chosen.left_out if one.doc_id == NAMES[0]]
    assert any(one.role == role and reason in one.reason for one in found), chosen.left_out
    assert not [one for one in chosen.demonstrations if (one.doc_id, one.role) == (NAMES[0], role)]


def test_the_shortest_right_attempt_that_searched_is_learnt(chosen_from):
    attempts = [
        attempt(search(), search("river"), ANSWERED),
        attempt(ANSWERED),
        attempt(search("Drosken", queries=None, error="no JSON"), ANSWERED),
        attempt(search("Drosken"), ANSWERED),
        attempt(search(), right=False),
    ]
    chosen = chosen_from(source(*questions(attempts=attempts)))
    learnt = {json.dumps(one.trajectory) for one in chosen.demonstrations if one.role == "solver"}
    assert learnt == {json.dumps(attempts[3]["trajectory"])}


def test_two_runs_do_not_teach_the_same_question_twice(chosen_from):
    chosen = chosen_from(source(*questions(NAMES[:6])), source(*questions(NAMES[4:]), name="other"))
    asked = [one.question for one in chosen.demonstrations if one.role == "challenger"]
    assert sorted(asked) == sorted({f"On which river does {name} lie?" for name in NAMES})
    left_out = [(one.source, one.reason.partition(":")[0]) for one in chosen.left_out]
    assert left_out == [("other", "duplicates")] * 2


def test_a_frequent_hop_count_is_cut_to_the_next(chosen_from):
    def two_hops(number, name):
        asked = last_turn(f"Where rises the river of {name}?", "Tesk")
        return question(number, name, hop=2, turns=[search(f"{name}bach"), asked])

    few = [two_hops(n, name) for n, name in enumerate(NAMES[:3])]
    chosen = chosen_from(source(*few, *questions(NAMES[3:], 3)))
    train = chosen.counts()["train"]
    assert train["challenger"]["1"] == train["challenger"]["2"] <= 3
    assert {one.reason for one in chosen.left_out} == {"balance: more of 1 hops than of any other count"}


def test_a_run_of_synthesize_has_no_attempts_and_teaches_the_challenger_alone(chosen_from):
    made = questions()
    for _, one in made:
        del one["attempts"]
    chosen = chosen_from(source(*made))
    assert {one.role for one in chosen.demonstrations} == {"challenger"}
    assert {one.reason for one in chosen.left_out} == {"attempts: the run made none"}


def test_preflight_refuses_a_batch_that_does_not_divide():
    words = ["hardware=cpu", "model=demo-policy", "endpoint=http://127.0.0.1:1/v1"]
    config = compose_stage("warm_start", [*words, "batch_size=3", "machine.gpus=2", "machine.device=cuda"])
    assert "batch_size" in {finding.key for finding in preflight(config, "warm_start").errors}


def preview_of(folder, **changed):
    """What a preview leaves, as far as a warm start reads it."""
    (folder / "prompts").mkdir(parents=True)
    write_prompts(folder / "prompts" / "zero_ratio1.parquet", [row for row, _ in questions()])
    settings = {
        "run": {"dir": str(folder)},
        "paths": {"corpus": "corpus"},
        "out_dir": f"{folder}/prompts",
        "hop_ratio": [1],
        "endpoint": "https://api.example.com/v1",
        "index": "chroma",
        "chroma": {"path": f"{folder}/chromadb", "collection": "preview"},
        "retrieval": {"embedder": "packaged-minilm", "url": None},
    }
    (folder / "resolved.yaml").write_text(yaml.safe_dump(settings | changed))
    prompts = fingerprint(folder / "prompts" / "zero_ratio1.parquet")
    identity = {"prompts": prompts, "model": "served as a-model at https://api.example.com/v1"}
    with Journal(folder / "samples.jsonl", identity) as journal:
        for _, asked in questions(NAMES[:3]):
            journal.append(asked)
    return folder


def test_a_run_is_read_where_it_lies_now_and_as_far_as_it_got(config, tmp_path, monkeypatch):
    preview_of(tmp_path / "then").rename(tmp_path / "now")
    with (tmp_path / "now" / "samples.jsonl").open("a") as journal:
        journal.write('{"prompt_index": 3, "sam')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("now", "~/now", f"{tmp_path}/now/"):
        read = read_source(Path(named))
        assert [row["extra_info"]["index"] for row in read.rows] == [0, 1, 2]
        assert read.teacher == "a-model at https://api.example.com/v1"
        searching = searching_as(config, read)
        assert (searching.chroma.path, searching.chroma.collection) == (f"{tmp_path}/now/chromadb", "preview")
        assert "quota" in searching.chroma  # which an older version may not have had


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("samples.jsonl", None, "no run of preview or synthesize is there"),
        ("resolved.yaml", None, "no run of preview or synthesize is there"),
        ("resolved.yaml", "data: [", "is damaged, or of an older version"),
        ("resolved.yaml", "run: {dir: then}\n", "is damaged, or of an older version"),
        ("samples.jsonl", '{"identity": {"pro', "is damaged, or of an older version"),
        ("samples.jsonl", '{"identity": null}', "is damaged, or of an older version"),
        ("samples.jsonl", '{"identity": {"prompts": "others", "model": "m"}}', "missing or have changed"),
        ("prompts/zero_ratio1.parquet", None, "missing or have changed"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, file, content, told):
    path = preview_of(tmp_path / "run") / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckError, match=told):
        read_source(tmp_path / "run")


def test_the_check_searches_each_runs_own_index_and_preflight_opens_it(config, tmp_path):
    at_service = {"retrieval": {"embedder": "packaged-minilm", "url": "http://127.0.0.1:9/x"}}
    runs = [preview_of(tmp_path / "one"), preview_of(tmp_path / "two", **at_service)]
    sources = [read_source(run) for run in runs]
    found = by_index(config, [*sources, sources[0]])
    assert [(one.chroma.path, one.retrieval.url, names) for one, names in found] == [
        (f"{tmp_path}/one/chromadb", None, [str(runs[0])]),
        (f"{tmp_path}/two/chromadb", "http://127.0.0.1:9/x", [str(runs[1])]),
    ]
    for named, path in (runs, f"{tmp_path}/one/chromadb"), (["nowhere"], config.chroma.path):
        learning = OmegaConf.merge(config, {"demonstrations": list(map(str, named))})
        assert searching_as_first(learning).chroma.path == path
    words = [f"from=[{runs[0]}, {runs[1]}]", "hardware=cpu", "model=demo-policy"]
    for more, refused in ([], runs), (["check=0"], []):
        errors = preflight(compose_stage("warm_start", [*words, *more]), "warm_start").errors
        told = [str(one) for one in errors if one.key == "demonstrations"]
        assert len(told) == len(refused)
        for run, text in zip(refused, told, strict=True):
            assert f"the check cannot search the index of {run}" in text


@pytest.mark.parametrize(
    ("word", "folders"),
    [
        ("from=runs/preview", ["runs/preview"]),
        ("from=~/my runs", ["~/my runs"]),
        ("from=[a, ~/b c, d(1)=e]", ["a", "~/b c", "d(1)=e"]),
        ("from=['a b', \"c\"]", ["a b", "c"]),
        ("from='a, b'", ["a, b"]),
        ("from=[]", []),
        ("from=", []),
    ],
)
def test_runs_are_named_as_a_user_types_them(word, folders):
    made = compose_stage("warm_start", [word, "hardware=cpu"])
    assert list(made.demonstrations) == folders


@pytest.mark.parametrize(
    ("rows", "gpus", "epochs", "batch_size", "planned"),
    [
        (100, 1, 3, 8, (8, 38)),
        (100, 1, 0.01, 8, (8, 1)),
        (5, 1, 3, 8, (5, 3)),
        (45, 8, 2, 64, (40, 2)),
        (5, 8, 3, 8, (8, 2)),
    ],
)
def test_a_batch_has_no_more_rows_than_there_are_and_as_many_for_every_gpu(
    config, rows, gpus, epochs, batch_size, planned
):
    sizes = {"epochs": epochs, "batch_size": batch_size, "machine": {"gpus": gpus}}
    assert batch_and_steps(OmegaConf.merge(config, sizes), rows) == planned


@pytest.mark.parametrize(
    ("logged", "told"),
    [
        ([(2.0, 1.0), (0.5, 1.0)], None),
        ([(0.1, 1.0), (0.9, 1.0)], None),  # batches differ
        ([(2.0, 1.0), (None, 1.0), (1.0, 1.0)], "step 2, loss or gradients are no number"),
        ([(2.0, None), (1.0, 1.0)], "step 1, loss or gradients are no number"),
        ([(2.0, 1.0), (3.5, 1.0)], "its loss grew from 2.00 to 3.50"),
    ],
)
def test_a_training_that_diverged_makes_no_model(tmp_path, logged, told):
    steps = [
        {"step": n, "data": {"train/loss": loss, "train/grad_norm": norm, "train/lr": 1e-3}}
        for n, (loss, norm) in enumerate(logged, 1)
    ]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "attempt_001.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in steps))
    with pytest.raises(CheckError, match=told) if told else nullcontext():
        check_learnt(tmp_path)


def test_the_new_model_is_used_with_the_settings_of_the_one_it_started_from(tmp_path):
    for words, name in (
        ([], "demo-policy"),
        (["model=qwen3-8b"], "qwen3-8b"),
        (["model=me/mine"], "qwen2.5-3b"),
    ):
        made = compose_stage("warm_start", ["hardware=cpu", *words])
        assert made.settings_of == name
    assert made.base_model == "me/mine"
    (tmp_path / "warm_start.json").write_text('{"settings_of": "demo-policy"}')
    made = compose_stage("challenger", ["hardware=cpu", f"model={tmp_path}"])
    assert (made.base_model, made.prompts.form) == (str(tmp_path), "short")
    (tmp_path / "warm_start.json").write_text("{")
    with pytest.raises(OverrideError, match="cannot be read"):
        compose_stage("challenger", ["hardware=cpu", f"model={tmp_path}"])


REPORT = {"counts": {"train": {"challenger": {"1": 3}, "solver": {"2": 4}}}, "before": {}, "after": {}}


def test_a_card_names_every_start_its_teachers_and_their_terms(config, tmp_path):
    config = config.copy()
    first, second = tmp_path / "one", tmp_path / "two"
    base = tmp_path / "models--me--small" / "snapshots" / "0a"
    for model, start, teacher, terms in (
        (first, base, "a-model at https://api.example.com/v1", None),
        (second, first, "another", "Apache-2.0.\n"),
    ):
        model.mkdir()
        config.base_model, config.terms = str(start), terms
        write_card(model, config, REPORT | {"teachers": [teacher]})
    card = (second / "README.md").read_text()
    assert "base_model: me/small" in card and f"- Started from: `{tmp_path.name}/one`\n" in card
    assert "3 of the challenger, 4 of the solver conversations; the teacher was another. Terms: Apac" in card
    assert f"- `{tmp_path.name}/one` was itself started: the teacher was a-model at https://api" in card
    assert "/v1. Terms: Nobody has stated them" in card
    assert "|" not in card  # nothing was held out


def test_a_folder_with_another_training_is_not_continued(config, chosen_from, tmp_path):
    chosen = chosen_from(source(*questions()))
    save_tiny_model(tmp_path / "tiny")
    config = config.copy()
    config.run.dir, config.base_model = str(tmp_path), str(tmp_path / "tiny")
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "made_from.json").write_text('{"demonstrations": "others"}')
    with pytest.raises(CheckError, match="holds a training with other demonstrations"):
        check_same(config, chosen)


def test_veRLs_supervised_trainer_still_has_no_hooks():
    from verl.trainer.sft_trainer import SFTTrainer  # with torch, which no other test here needs

    # When it has some, `Progress` need not take the places of its parts.
    assert not [name for name in dir(SFTTrainer) if name.startswith("on_")]


def words_of(folder, url, *more):
    """As a user types it: a teacher asks about twelve documents, and a tiny model learns."""
    model = folder / "tiny"
    if not model.exists():
        save_tiny_model(model)
    places = [f"paths.corpus={folder}/corpus", f"paths.checkpoints={folder}/runs", "run.min_free_gb=0.1"]
    sizes = ["rows=12", "hop_ratio=[1,1]", "min_document_tokens=0", "fit_hops=false", "hardware=cpu"]
    sizes += ["process_env.OMP_NUM_THREADS=1", "held_out_share=0.3", "least=4", "batch_size=4", "epochs=4"]
    sizes += ["check=2", "solver.max_context_tokens=2048", "learning_rate=1e-3", "max_document_tokens=64"]
    sizes += ["compute.max_usd=null"]
    teacher = [f"source={write_towns(folder)}", f"endpoint={url}", f"endpoint_model={MODEL}"]
    return [*teacher, f"model={model}", *places, *sizes, *more]


def weights(folder):
    found = HfWeights(folder / "runs" / "warm_start" / "model")
    return {name: handle.get_tensor(name) for name, handle in found.handles.items()}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A run from an endpoint to the model, never disturbed."""
    folder = tmp_path_factory.mktemp("learnt")
    with scripted_endpoint() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        assert main(["warm-start", *words_of(folder, endpoint.url)]) == 0
        asked = len(endpoint.requests)
        assert main(["warm-start", *words_of(folder, endpoint.url)]) == 0
        assert len(endpoint.requests) == asked
    return folder


@pytest.mark.slow("the first tier chooses, renders and composes the same")
def test_a_teachers_conversations_become_a_model_with_its_card_and_its_check(learnt):
    run = learnt / "runs" / "warm_start"
    report = json.loads((run / "report.json").read_text())
    assert report["losses"]["last_train"] < report["losses"]["first_train"]
    assert report["before"].keys() == report["after"].keys() >= {"valid", "right", "answered"}
    written = [json.loads(line) for line in (run / "demonstrations.jsonl").read_text().splitlines()]
    assert {one["role"] for one in written} == {"challenger", "solver"} and len(written) >= 8
    card = (run / "model" / "README.md").read_text()
    assert MODEL in card and "Nobody has stated them" in card
    assert not [path for path in run.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    made = compose_stage("challenger", ["hardware=cpu", f"model={run / 'model'}"])
    assert made.base_model == str(run / "model") and made.prompts.form == "full"
    assert json.loads((run / "result.json").read_text())["figures"]["demonstrations"] >= 4
    phases = [json.loads(line)["phase"] for line in (run / "heartbeats.jsonl").read_text().splitlines()]
    assert set(phases) == {"update", "validation", "save", "done"} and phases[-1] == "done"


@pytest.mark.slow("the first tier refuses to continue another training")
def test_killed_while_it_asks_and_trains_and_out_of_time_it_ends_with_the_same_weights(learnt, tmp_path):
    journal = tmp_path / "runs" / "warm_start" / "preview" / "samples.jsonl"
    tracker = tmp_path / "runs" / "warm_start" / "training" / "latest_checkpointed_iteration.txt"
    env = os.environ | {"OPENAI_API_KEY": KEY}
    with scripted_endpoint(delay_s=0.1) as endpoint:
        command = [sys.executable, "-m", "drzero.cli", "warm-start", *words_of(tmp_path, endpoint.url)]
        for sign in (
            lambda: journal.is_file() and len(journal.read_bytes().splitlines()) > 3,
            tracker.is_file,
        ):
            process = subprocess.Popen(command, env=env, start_new_session=True)
            while not sign():
                assert process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stop = {"DRZERO_STOP_AT": str(time.time() + 140)}  # too near for a second step
        assert subprocess.run(command, env=env | stop, check=False).returncode == os.EX_TEMPFAIL
        assert subprocess.run(command, env=env, check=False).returncode == 0
    undisturbed, resumed = weights(learnt), weights(tmp_path)
    assert undisturbed.keys() == resumed.keys()
    assert all(undisturbed[name].equal(resumed[name]) for name in undisturbed)


@pytest.mark.slow("the first tier watches a trainer that stands still")
def test_a_training_that_stands_still_is_stopped_and_says_where(tmp_path):
    beats = tmp_path / "runs" / "warm_start" / "heartbeats.jsonl"
    watched = ("watchdog.policy=stop", "watchdog.limits.update=8", "epochs=100", "check=0")
    with scripted_endpoint() as endpoint:
        words = words_of(tmp_path, endpoint.url, *watched)
        process = subprocess.Popen(
            [sys.executable, "-m", "drzero.cli", "warm-start", *words],
            env=os.environ | {"OPENAI_API_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while not (beats.is_file() and '"step": 3, "phase": "update"' in beats.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        keeper, trainer = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "verl_ext.trainer.supervised" in child.cmdline()
        )
        trainer.send_signal(signal.SIGSTOP)
        said, _ = process.communicate()
    assert process.returncode == 1
    assert f"the run stalled and was stopped: trainer (pid {trainer.pid}) is stopped by a signal" in said
    assert not trainer.is_running() and not keeper.is_running()
