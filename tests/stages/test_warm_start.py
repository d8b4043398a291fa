"""The warm start: which conversations it learns from, and why others are left out; and whole runs of it.

Whole runs are of the second tier. Their teacher plays by a script over real search, and a tiny model learns.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from made_pairs import DOCUMENT, last_turn, prompt, record, search
from scripted_endpoint import KEY, MODEL, scripted_endpoint, write_towns
from tiny_model import save_tiny_model

from data.gates import Gates, GateSettings
from drzero.checkpoints.weights import HfWeights
from drzero.cli import main
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import OverrideError
from drzero.stages.warm_start import warm_start_overrides
from drzero.stages.warm_start.choose import Source, choose, read_source
from drzero.stages.warm_start.training import train
from verl_ext.method.chat import turn_end_id

ANSWERED = "<think>So it is.</think>\n<answer>Galmir</answer>"


def attempt(*turns, right=True, finished=True):
    said = record(*turns)["trajectory"]
    searches = sum(bool(turn["calls"]) for turn in said["turns"])
    about = {"finished": finished, "right": right, "searches": searches, "tokens_out": 10 * len(turns)}
    return about | {"answer": "Galmir" if right else "Tesk", "failure": None, "trajectory": said}


def question(number, name, *, attempts, hop=1, turns=None):
    """A prompt about a river's town of its own, and the record of its question."""
    document = DOCUMENT.replace("Drosken", name).replace("Galmir", f"{name}bach")
    asked = last_turn(f"On which river does {name} lie?", f"{name}bach")
    row = prompt(number, hop, document, doc_id=name)
    return row, record(*(turns or [asked]), prompt_index=number) | {"attempts": attempts}


def source(*made, name="preview"):
    rows, records = (list(part) for part in zip(*made, strict=True))
    return Source(name, "a teacher", {}, rows, records)


@pytest.fixture(scope="module")
def config():
    overrides = ["hardware=cpu", "model=demo-policy", "from=nothing", "held_out_share=0.2"]
    return resolve(compose_stage("warm_start", warm_start_overrides(overrides)))


@pytest.fixture
def chosen_from(config, smollm2_tokenizer):
    gates = Gates(GateSettings(near_duplicates=False, contamination=False))
    return lambda *sources: choose(config, sources, smollm2_tokenizer, gates)


GOOD = [attempt(search(), ANSWERED)]
NAMES = ("Velmar", "Ostrel", "Kestmoor", "Brisfal", "Tolvane", "Aldun", "Mirrow", "Nesk", "Pell", "Quern")


def test_a_confirmed_pair_gives_a_conversation_of_each_role_and_documents_are_in_one_split(chosen_from):
    chosen = chosen_from(source(*(question(n, name, attempts=GOOD) for n, name in enumerate(NAMES))))
    assert chosen.left_out == []
    assert chosen.counts() == {
        "train": {"challenger": {"1": 8}, "solver": {"1": 8}},
        "held_out": {"challenger": {"1": 2}, "solver": {"1": 2}},
    }
    documents = [{one.doc_id for one in chosen.of(split)} for split in ("train", "held_out")]
    assert documents[0] | documents[1] == set(NAMES) and not documents[0] & documents[1]
    assert {pair.doc_id for pair in chosen.held_out_pairs} == documents[1]


def test_only_the_models_own_turns_with_their_ends_are_learnt(chosen_from, smollm2_tokenizer):
    chosen = chosen_from(source(*(question(n, name, attempts=GOOD) for n, name in enumerate(NAMES))))
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
        (
            {"attempts": [attempt(search(), "<answer>Tesk</answer>", right=False)]},
            "challenger",
            "nobody confirms",
        ),
        ({"attempts": [attempt(search(), ANSWERED, finished=False)]}, "solver", "nobody confirms"),
        ({"attempts": [attempt(ANSWERED)]}, "solver", "the right ones did not search"),
        (
            {"attempts": [attempt(search(queries=None, error="no JSON"), ANSWERED)]},
            "solver",
            "a call was not valid",
        ),
        ({"attempts": GOOD, "turns": ["<question>Who?</question>"]}, "challenger", "gives no answer"),
        ({"attempts": GOOD, "hop": 2}, "challenger", "hops: "),
        (
            {"attempts": [attempt(search("x " * 2000), ANSWERED)]},
            "solver",
            "longer than rollout.max_tokens_per_turn=96",
        ),
        ({"attempts": [attempt(search(), f"<|im_end|>{ANSWERED}")]}, "solver", "a special token"),
    ],
)
def test_what_cannot_be_imitated_is_left_out_with_its_reason(chosen_from, changed, role, reason):
    others = [question(n, name, attempts=GOOD) for n, name in enumerate(NAMES[1:], 1)]
    chosen = chosen_from(source(question(0, NAMES[0], **changed), *others))
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
    chosen = chosen_from(source(*(question(n, name, attempts=attempts) for n, name in enumerate(NAMES))))
    learnt = {json.dumps(one.trajectory) for one in chosen.demonstrations if one.role == "solver"}
    assert learnt == {json.dumps(attempts[3]["trajectory"])}


def test_two_runs_do_not_teach_the_same_question_twice(chosen_from):
    first = source(*(question(n, name, attempts=GOOD) for n, name in enumerate(NAMES[:6])))
    second = source(*(question(n, name, attempts=GOOD) for n, name in enumerate(NAMES[4:])), name="other")
    chosen = chosen_from(first, second)
    asked = [one.question for one in chosen.demonstrations if one.role == "challenger"]
    assert sorted(asked) == sorted({f"On which river does {name} lie?" for name in NAMES})
    assert [(one.source, one.reason.partition(":")[0]) for one in chosen.left_out] == [
        ("other", "duplicates")
    ] * 2


def test_a_frequent_hop_count_is_cut_to_the_next(chosen_from):
    def two_hops(number, name):
        asked = last_turn(f"Where rises the river of {name}?", "Tesk")
        row, made = question(number, name, attempts=GOOD, hop=2, turns=[search(f"{name}bach"), asked])
        return row, made

    few = [two_hops(n, name) for n, name in enumerate(NAMES[:3])]
    many = [question(n, name, attempts=GOOD) for n, name in enumerate(NAMES[3:], 3)]
    chosen = chosen_from(source(*few, *many))
    train = chosen.counts()["train"]
    assert train["challenger"]["1"] == train["challenger"]["2"] <= 3
    assert {one.reason for one in chosen.left_out} == {"balance: more of 1 hops than of any other count"}


def test_a_run_of_synthesize_has_no_attempts_and_teaches_the_challenger_alone(chosen_from):
    made = [question(n, name, attempts=GOOD) for n, name in enumerate(NAMES)]
    for _, one in made:
        del one["attempts"]
    chosen = chosen_from(source(*made))
    assert {one.role for one in chosen.demonstrations} == {"challenger"}
    assert {one.reason for one in chosen.left_out} == {"attempts: the run made none"}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], "demonstrations"),
        (["from=nowhere"], "demonstrations"),
        (
            ["endpoint=http://127.0.0.1:1/v1", "batch_size=3", "machine.gpus=2", "machine.device=cuda"],
            "batch_size",
        ),
    ],
)
def test_preflight_refuses_a_start_without_teachers_or_with_a_batch_that_does_not_divide(overrides, key):
    words = warm_start_overrides(["hardware=cpu", "model=demo-policy", *overrides])
    report = preflight(compose_stage("warm_start", words), "warm_start")
    assert key in {finding.key for finding in report.errors}


def test_a_folder_without_a_run_or_with_other_prompts_is_refused(tmp_path):
    with pytest.raises(CheckError, match="no run of preview or synthesize"):
        read_source(tmp_path)
    (tmp_path / "resolved.yaml").write_text("data: {train_files: gone.parquet}\nsolver: {model_path: m}\n")
    (tmp_path / "samples.jsonl").write_text('{"identity": {"prompts": "then"}}\n')
    with pytest.raises(CheckError, match=r"gone.parquet, are missing or have changed"):
        read_source(tmp_path)


def test_the_new_model_is_used_with_the_settings_of_the_one_it_started_from(tmp_path):
    words = warm_start_overrides(["from=a", "model=demo-policy"])
    made = compose_stage("warm_start", ["hardware=cpu", *words])
    assert (made.demonstrations, made.settings_of) == (["a"], "demo-policy")
    made = compose_stage("warm_start", ["hardware=cpu", *warm_start_overrides(["model=me/mine"])])
    assert (made.base_model, made.settings_of) == ("me/mine", "qwen2.5-3b")
    (tmp_path / "warm_start.json").write_text('{"settings_of": "demo-policy"}')
    made = compose_stage("challenger", ["hardware=cpu", f"model={tmp_path}"])
    assert (made.base_model, made.prompts.form) == (str(tmp_path), "short")
    (tmp_path / "warm_start.json").write_text("{")
    with pytest.raises(OverrideError, match="cannot be read"):
        compose_stage("challenger", ["hardware=cpu", f"model={tmp_path}"])


def test_a_folder_with_another_training_is_not_continued(config, chosen_from, tmp_path):
    chosen = chosen_from(source(*(question(n, name, attempts=GOOD) for n, name in enumerate(NAMES))))
    save_tiny_model(tmp_path / "tiny")
    config = config.copy()
    config.run.dir, config.base_model = str(tmp_path), str(tmp_path / "tiny")
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "made_from.json").write_text('{"demonstrations": "others"}')
    with pytest.raises(CheckError, match="holds a training with other demonstrations"):
        train(config, chosen)


def words_of(folder, url, *more):
    """As a user types it: a teacher asks about twelve documents, and a tiny model learns."""
    model = folder / "tiny"
    if not model.exists():
        save_tiny_model(model)
    places = [f"paths.corpus={folder}/corpus", f"paths.checkpoints={folder}/runs", "run.min_free_gb=0.1"]
    sizes = ["rows=12", "hop_ratio=[1,1]", "min_document_tokens=0", "fit_hops=false", "hardware=cpu"]
    sizes += ["process_env.OMP_NUM_THREADS=1", "held_out_share=0.3", "least=4", "batch_size=4", "epochs=4"]
    sizes += [
        "check=2",
        "solver.max_context_tokens=2048",
        "learning_rate=1e-3",
        "max_document_tokens=64",
        "compute.max_usd=null",
    ]
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
    assert MODEL in card and "Nobody has stated them" in card and KEY not in card
    made = compose_stage("challenger", ["hardware=cpu", f"model={run / 'model'}"])
    assert made.base_model == str(run / "model") and made.prompts.form == "full"
    assert json.loads((run / "result.json").read_text())["figures"]["demonstrations"] >= 4


@pytest.mark.slow("the first tier refuses to continue another training")
def test_killed_while_it_asks_and_while_it_trains_it_ends_with_the_same_weights(learnt, tmp_path):
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
        assert subprocess.run(command, env=env, check=False).returncode == 0
    undisturbed, resumed = weights(learnt), weights(tmp_path)
    assert undisturbed.keys() == resumed.keys()
    assert all(undisturbed[name].equal(resumed[name]) for name in undisturbed)
