"""Overrides as users type them, judged against veRL's real config and dataclasses."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from drzero.recipe.compose import compose_stage
from drzero.recipe.overrides import OverrideError, assigned, check_overrides
from drzero.recipe.settings import verl
from drzero.recipe.settings.schema import Schema

VERL_ALONE = Schema("challenger", {})
"""A stage with a trainer and none of our keys."""


def write_config(folder, base):
    files = {
        "challenger.yaml": base,
        "model/small.yaml": "# @package _global_\ndata: {max_prompt_length: 64}\n",
        "model/large.yaml": "# @package _global_\ndata: {max_prompt_length: 128}\n",
        "mode/sync.yaml": "# @package _global_\n",
        "mode/separate_async.yaml": "# @package _global_\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def config_dir(tmp_path_factory):
    base = """
defaults: [ppo_trainer, {model: small}, {mode: sync}, _self_]
hydra: {searchpath: ["pkg://verl.trainer.config"]}
"""
    return write_config(tmp_path_factory.mktemp("config"), base)


@pytest.fixture(scope="module")
def small_config_dir(tmp_path_factory):
    base = """
defaults: [{model: small}, {mode: sync}, _self_]
data: {files: [a, b], max_prompt_length: 1, 7: x}
trainer: {steps: 3, path: null, name: "${data.files.0}", missing: "???"}
reward: {_target_: fractions.Fraction, a: 1}
"""
    return write_config(tmp_path_factory.mktemp("small"), base)


def refusal(config_dir, *overrides):
    with pytest.raises(OverrideError) as caught:
        check_overrides(list(overrides), config_dir, VERL_ALONE)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.total_training_steps=2", "+trainer.foo=1"],
        ["++trainer.foo=1", "++trainer.total_epochs=2"],
        ["+trainer.foo=1", "trainer.foo=2"],
        ["+trainer.new={a: 1}", "trainer.new.a=2", "~trainer.new.a"],
        ["~trainer.total_epochs"],
        ["model=large", "mode=separate_async"],
        ["model_engine=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"],
        ["+actor_rollout_ref.actor.use_rollout_log_probs=true"],
        ["+actor_rollout_ref.rollout.engine_kwargs.sglang.mem_fraction_static=0.5"],
        ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"],
        ["+actor_rollout_ref.rollout.custom={anything: {goes: 1}}"],
        ["algorithm.rollout_correction=null"],
        ["trainer={total_epochs: 3}"],
        ["trainer.experiment_name='a, b'"],
        ["trainer.total_epochs=${trainer.nnodes}"],
        ["hydra.run.dir=/tmp/x"],
        ["trainer.logger=console", "trainer.save_freq=null", "actor_rollout_ref.rollout.top_p=0.9"],
    ],
    ids=" ".join,
)
def test_an_override_that_can_work_is_accepted(config_dir, overrides):
    check_overrides(overrides, config_dir, VERL_ALONE)


ACTOR, NO_KEY, NO_FIELD = "actor_rollout_ref.actor", "there is no key", "has no field"
REFUSED = {
    "trainer.gamma=1": [NO_KEY, "'algorithm.gamma'"],
    f"{ACTOR}.lr=1e-6": [NO_KEY, f"'{ACTOR}.optim.lr'"],
    "trainer={total_epoch: 3}": [NO_KEY, "'trainer.total_epochs'"],
    "modle=large": [NO_KEY, "'model'"],
    "~trainer.total_epoch": [NO_KEY, "'trainer.total_epochs'"],
    # Adding a key is advised only if veRL knows its name.
    "trainer.total_training_stepz=1": [NO_KEY, "'trainer.total_training_steps'"],
    "trainer.save_freq=never": ["trainer.save_freq is 'never', not a number"],
    "++trainer.save_freq=true": ["is True, not a number"],
    "trainer={val_only: 1}": ["trainer.val_only is 1, not true or false"],
    "trainer.logger=3": ["trainer.logger is 3, not a list"],
    f"+{ACTOR}={{clip_ration: 1}}": [NO_FIELD, f"'{ACTOR}.clip_ratio'"],
    "+actor_rollout_ref.rollout.engine_kwarg.sglang.x=1": [
        NO_FIELD,
        "'actor_rollout_ref.rollout.engine_kwargs'",
    ],
    "model=3": ["takes the name of an option: large, small$"],
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_override_that_cannot_work_is_refused_with_what_was_meant(config_dir, override):
    message = f"^{refusal(config_dir, override)}$"
    assert [part for part in REFUSED[override] if part not in message] == []
    assert not (override.startswith("trainer.total_training_stepz") and "+" in message)


def test_every_renamed_key_is_gone_and_its_successor_exists(config_dir):
    compose_stage("challenger", ["hardware=cpu", *(f"{new}=2" for new in verl.RENAMED.values())])
    for key in verl.RENAMED:
        assert "is now" in refusal(config_dir, f"{key}=2")


@pytest.mark.parametrize(
    ("typed", "files"),
    [
        ("benchmarks=[exam=my/q.csv,b.jsonl]", ["exam=my/q.csv", "b.jsonl"]),
        ("benchmarks=[staff exam=~/q 1.csv, b.jsonl]", ["staff exam=~/q 1.csv", "b.jsonl"]),
        ("benchmarks=[exam=my q (1).csv,staff's.csv]", ["exam=my q (1).csv", "staff's.csv"]),
        ("benchmarks=[the 'new' one.csv]", ["the 'new' one.csv"]),
        ("benchmarks=['exam=a,b.csv']", ["exam=a,b.csv"]),
        ('benchmarks=["exam=q.csv"]', ["exam=q.csv"]),
    ],
)
def test_files_in_a_list_may_have_names_and_a_home_without_further_quotes(typed, files):
    assert compose_stage("evaluate", ["hardware=cpu", typed]).benchmarks == files


@pytest.mark.parametrize(
    ("override", "position"),
    [("trainer.name=[1,", 17), ("trainer..name=1", 8), ("trainer.name=a: {b", 17), ("trainer.name", 13)],
)
def test_a_syntax_error_is_shown_at_its_place_with_a_hint(config_dir, override, position):
    message = refusal(config_dir, override)
    shown, pointer = message.splitlines()[1:3]
    assert (shown, pointer) == (f"  {override}", f"  {' ' * (position - 1)}^ at position {position}")
    assert "Quote a value" in message


KEYS = (
    "data data.files data.files.0 data.7 trainer trainer.steps trainer.name trainer.missing.x reward "
    "reward.b reward.a.c model mode model@data hydra hydra.run hydra/launcher new.a.b"
)
VALUES = "1|null|x|[1,2]|{a: 1}|{a: {b: 2}}|{7: 1}|'q'|${data.files}|${|???|1,2|small|"
TYPED = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from([*KEYS.split(), ""]),
    st.sampled_from(["=", ""]),
    st.sampled_from(VALUES.split("|")),
)


@given(overrides=st.lists(st.one_of(TYPED, st.text(max_size=20)), min_size=1, max_size=3))
@example(overrides=["+trainer.a={}", "trainer.a.b=1"])
@example(overrides=["data.files.²=1"])
@example(overrides=["~data.files.0"])
@example(overrides=["hydra.run=1"])
@example(overrides=["model="])
@example(overrides=["x=" + "[" * 2000])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_accepted_or_refused_with_a_message(small_config_dir, overrides):
    try:
        check_overrides(overrides, small_config_dir, VERL_ALONE)
    except OverrideError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("/data/notes (old)/a,b.jsonl", "/data/notes (old)/a,b.jsonl"),
        ('/data/it\'s "here" [1] {x}.md', '/data/it\'s "here" [1] {x}.md'),
        ("~/notes/a b.csv", f"{Path.home()}/notes/a b.csv"),
        ("'quoted for Hydra'", "quoted for Hydra"),
        ("docs/**/*.md", "docs/**/*.md"),
        ("C:\\a\\", "C:\\a\\"),
        ("${paths.corpus}/x (1).jsonl", "/corpus/x (1).jsonl"),
        ("null", None),
    ],
)
def test_a_path_is_taken_as_it_is_typed(typed, path):
    config = compose_stage("prepare_data", ["hardware=cpu", "paths.corpus=/corpus", f"source={typed}"])
    assert config.source == path


@pytest.mark.parametrize("typed", ["1e3", "007", "2024", "1_000", "true", "NaN", "-inf", "int(3)", "0x10"])
def test_a_text_that_reads_as_a_number_stays_the_text(typed):
    words = [f"source={typed}", f"++fields.title={typed}", f"base_model={typed}", f"hold_out=[{typed}, b]"]
    config = compose_stage("prepare_data", ["hardware=cpu", *words])
    assert [config.source, config.fields.title, config.base_model] == [typed] * 3
    assert config.hold_out == [typed, "b"]
    # A key that takes numbers, or null, still does.
    config = compose_stage("evaluate", ["hardware=cpu", "run.name=null", "data.seed=7", "endpoint=null"])
    assert (config.run.name, config.endpoint) == ("null", None)


@given(st.text(st.characters(exclude_characters="$", exclude_categories=["C"]), min_size=1))
@example('/home/Anna, work/it\'s "[1]" {x}\\')
@settings(max_examples=50)
def test_an_override_that_our_code_makes_sets_any_text(text):
    for override, value in ((assigned("k", text), text), (assigned("k", [text, "b"]), [text, "b"])):
        assert OverridesParser.create().parse_override(override).value() == value


def test_an_old_key_works_for_this_release_and_says_its_new_name(capsys):
    config = compose_stage("merge", ["hardware=cpu", "watchdog.factor=7"])
    assert config.watchdog.patience_factor == 7
    assert "watchdog.factor is now watchdog.patience_factor" in capsys.readouterr().err
