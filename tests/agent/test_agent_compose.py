"""The config of an agent: what the loop in paths.checkpoints recorded, and what is typed."""

import pytest
from omegaconf import OmegaConf

from drzero.agent.compose import beside, compose_agent
from drzero.ops.errors import UserError
from drzero.recipe.compose import compose_stage, resolve, write_resolved
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import OverrideError

SETTINGS = {
    "prompts.form": "short",
    "solver.max_turns": 3,
    "solver.max_tokens_per_turn": 111,
    "solver.max_context_tokens": 900,
    "retrieval.topk": 7,
    "retrieval.response_limit": 555,
}
INDEX = {
    "chroma.path": "/data/corpus/an index",
    "chroma.collection": "towns",
    "retrieval.embedder": "packaged-minilm",
}
DEFAULTS = compose_stage("ask", ["hardware=cpu"])


@pytest.fixture
def compose(tmp_path):
    def composed(*overrides):
        typed = [f"paths.checkpoints={tmp_path}", "hardware=cpu", *overrides]
        return resolve(compose_agent("ask", typed))

    return composed


@pytest.fixture
def record(tmp_path):
    # Make a loop's folder: runs with their settings, as the stages write them, and solvers.

    def write(*runs, solvers=(), **settings):
        places = {"base_model": "/models/base", "paths.corpus": "/data/corpus"}
        given = [f"{key}={value}" for key, value in {**places, **SETTINGS, **INDEX, **settings}.items()]
        for name in runs:
            stage, _, iteration = name.partition("_iter")
            run = [f"paths.checkpoints={tmp_path}", "hardware=cpu", f"iteration={iteration}"]
            write_resolved(resolve(compose_stage(stage, [*run, *given])))
        for iteration in solvers:
            (tmp_path / f"solver_iter{iteration}_hf").mkdir()

    return write


def values(config, keys):
    return {key: OmegaConf.select(config, key) for key in keys}


def test_the_last_iteration_answers_counted_as_numbers(record, compose, tmp_path):
    record("evaluate_iter0", solvers=[1, 2, 9, 10])
    (tmp_path / "solver_iter11").mkdir()
    (tmp_path / "solver_iter12_hf.building").mkdir()
    config = compose()
    assert config.iteration == 10
    assert config.solver.model_path == str(tmp_path / "solver_iter10_hf")


@pytest.mark.parametrize("run", ["evaluate_iter2", "solver_iter2", "evaluate_iter0", "solver_iter1"])
def test_what_a_run_recorded_is_taken_and_the_temperature_is_zero(record, compose, run):
    record(run, solvers=[2])
    config = compose()
    assert values(config, SETTINGS) == SETTINGS
    assert values(config, INDEX) == INDEX
    assert config.base_model == "/models/base" and config.paths.corpus == "/data/corpus"
    assert config.solver.temperature == 0


def test_a_solver_s_own_evaluation_comes_before_others(record, compose):
    record("evaluate_iter0", **{"retrieval.topk": 1})
    record("evaluate_iter1", **{"retrieval.topk": 2})
    record("solver_iter1", "solver_iter2", **{"retrieval.topk": 3})
    record(solvers=[1, 2])
    topk = [compose(f"iteration={iteration}").retrieval.topk for iteration in range(4)]
    assert topk == [1, 2, 3, 1]
    assert compose().retrieval.topk == 3


def test_the_model_before_training_is_the_base_of_the_run(record, compose):
    record("evaluate_iter0", solvers=[1])
    config = compose("iteration=0")
    assert config.solver.model_path == "/models/base"
    assert values(config, SETTINGS) == SETTINGS


def test_what_is_typed_wins(record, compose):
    record("evaluate_iter1", solvers=[1])
    config = compose("retrieval.topk=2", "chroma.collection=other", "solver.max_turns=5")
    assert (config.retrieval.topk, config.solver.max_turns, config.prompts.form) == (2, 5, "short")


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        (["model=demo-policy"], "/data/corpus/models/demo-policy"),
        (["base_model=/models/mine"], "/models/mine"),
        (["solver.model_path=/models/mine"], "/models/mine"),
        (["endpoint=http://127.0.0.1:1/v1", "api=chat", "model=a-model"], None),
    ],
)
def test_another_model_takes_only_the_index(record, compose, typed, model):
    record("evaluate_iter0", solvers=[1])
    config = compose(*typed)
    assert values(config, INDEX) == INDEX
    assert config.iteration == 0
    assert config.solver.max_context_tokens != SETTINGS["solver.max_context_tokens"]
    assert config.retrieval.topk != SETTINGS["retrieval.topk"]
    if model is None:  # behind an endpoint, as in evaluate
        assert (config.endpoint_model, config.prompts.form) == ("a-model", "full")
    else:
        assert (config.solver.model_path, config.prompts.form) == (model, "short")


@pytest.mark.parametrize(
    ("typed", "place"),
    [
        ("chroma.path=/elsewhere", {"chroma.path": "/elsewhere", "chroma.collection": "corpus"}),
        ("chroma.collection=other", {"chroma.path": "/data/corpus/chromadb"}),
        ("index=faiss", {"index": "faiss", "faiss.path": "/data/corpus/faiss"}),
        ("retrieval.url=http://127.0.0.1:9", {"retrieval.url": "http://127.0.0.1:9"}),
    ],
)
def test_a_typed_place_of_an_index_replaces_the_recorded_one(record, compose, typed, place):
    record("evaluate_iter1", solvers=[1])
    config = compose(typed, "paths.corpus=/data/corpus")
    assert values(config, place) == place
    assert values(config, SETTINGS) == SETTINGS
    assert config.retrieval.embedder == DEFAULTS.retrieval.embedder


def test_an_index_in_the_corpus_s_folder_follows_it(record, compose):
    shards = {"chroma.path": "[/data/corpus/a,/data/corpora/b]", "chroma.shards": 2}
    record("evaluate_iter1", solvers=[1], **shards)
    config = compose("paths.corpus=/moved here")
    assert config.chroma.path == ["/moved here/a", "/data/corpora/b"]
    assert config.chroma.collection == "towns"


def test_a_recorded_service_is_searched_again(record, compose):
    record("evaluate_iter1", solvers=[1], **{"retrieval.url": "https://search.example.com"})
    assert compose().retrieval.url == "https://search.example.com"
    config = compose("chroma.path=/elsewhere")
    assert (config.retrieval.url, config.chroma.path) == (None, "/elsewhere")


def test_without_a_loop_the_message_says_what_to_do(compose, tmp_path):
    with pytest.raises(UserError, match=r"train one .*paths\.checkpoints=.*endpoint=") as raised:
        compose()
    assert f"no trained solver in {tmp_path}: " in str(raised.value)
    assert compose("model=demo-policy").iteration == 0
    assert compose("iteration=3").solver.model_path == str(tmp_path / "solver_iter3_hf")


def test_damaged_settings_are_named(record, compose, tmp_path):
    record(solvers=[1])
    damaged = tmp_path / "evaluate_iter1" / "resolved.yaml"
    damaged.parent.mkdir()
    damaged.write_text("retrieval: {topk: [")
    with pytest.raises(CheckError, match=r"evaluate_iter1/resolved\.yaml"):
        compose()


@pytest.mark.parametrize("typed", ["retrieval.topkk=3", "iteration=two", "prompts.form=long-winded"])
def test_a_wrong_key_is_refused_by_name(record, compose, typed):
    record("evaluate_iter0", solvers=[1])
    with pytest.raises(OverrideError, match=typed.partition("=")[0]):
        compose(typed)


def test_an_iteration_is_the_loop_s_even_where_its_model_is_typed_again(record, compose, tmp_path):
    record("evaluate_iter2", solvers=[2, 3])
    config = compose("iteration=2", "model=demo-policy")
    assert config.solver.model_path == str(tmp_path / "solver_iter2_hf")
    assert values(config, SETTINGS) == SETTINGS
    assert compose("iteration=0", "model=demo-policy").solver.model_path.endswith("/demo-policy")


@pytest.mark.parametrize(
    ("typed", "compared", "other"),
    [
        ([], "iteration=0", ["iteration=0"]),
        (["iteration=2", "retrieval.topk=1"], "iteration=0", ["retrieval.topk=1", "iteration=0"]),
        (["model=a"], "model=b", ["model=b"]),
        (["endpoint=http://a", "endpoint_model=m", "api=chat"], "iteration=3", ["iteration=3"]),
        (["iteration=3"], "endpoint=http://a api=chat", ["endpoint=http://a", "api=chat"]),
        (["iteration=3", "retrieval.topk=5"], "retrieval.topk=1", ["iteration=3", "retrieval.topk=1"]),
    ],
)
def test_another_agent_replaces_what_names_the_first(typed, compared, other):
    assert beside(typed, compared) == other


@pytest.mark.parametrize("compared", ["", "0", "Who?", "model='a", "iteration=0 Who?"])
def test_what_names_no_agent_is_refused(compared):
    with pytest.raises(UserError, match="--compare takes what names the other agent, such as iteration=0"):
        beside([], compared)
