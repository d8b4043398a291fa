"""Our own config keys: declared once, checked when a config composes, and listed in docs/config.md."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data.gates import GateSettings
from drzero.commands.config import NoSuchKey, as_markdown, run_config
from drzero.preflight.inputs import gate_settings
from drzero.recipe.compose import CONFIG_DIR, compose_stage, resolve
from drzero.recipe.overrides import OverrideError
from drzero.recipe.settings import verl
from drzero.recipe.settings.retrieval import MAX_TOPK
from drzero.recipe.settings.schema import STAGES, WITH_VERL, all_keys, pace_keys, run_keys, schema_of
from search.wire import MAX_TOPK as SERVED_TOPK

WITHOUT_VERL = [stage for stage in STAGES if stage not in WITH_VERL and stage != "evolve"]


def refusal(stage, override):
    with pytest.raises(OverrideError) as refused:
        compose_stage(stage, ["hardware=cpu", override])
    return str(refused.value)


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_has_a_doc_line_and_a_default_that_it_allows(stage):
    for name, key in schema_of(stage).keys.items():
        assert key.limits.doc.endswith("."), name
        if key.default != "???" and "${" not in str(key.default):
            assert key.fault(key.default) is None, name


def test_the_page_of_the_keys_is_current():
    page = (CONFIG_DIR.parent / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run: drzero config --write docs/config.md"


def test_settings_import_nothing_heavy():
    script = (
        "import sys, drzero.recipe.settings.schema\n"
        "top = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(top & {'torch', 'transformers', 'ray', 'verl', 'search', 'data', 'ops', 'rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("retrieval.topkk=3", "'retrieval.topk'"),
        ("+retrieval.topkk=3", "'retrieval.topk'"),
        ("retrieval={topk: 3, prot: 1}", "'retrieval.port'"),
        ("+watchdog.limits.saving=9", "'watchdog.limits.save'"),
        ("retrieval.topk=many", "is 'many', not a whole number"),
        ("retrieval.topk=2.5", "is 2.5, not a whole number"),
        ("retrieval.topk=true", "is True, not a whole number"),
        ("retrieval.topk=null", "is None, not a whole number"),
        ("retrieval.topk=${log_level}", "retrieval.topk is not a whole number"),
        ("solver.engine=sglan", "did you mean 'sglang'?"),
        ("solver.mem_fraction_static=0", "not a number above 0 and at most 1"),
        ("retrieval.access_log=1", "is 1, not true or false"),
        ("run.name=[a]", "not text"),
        ("retrieval=null", "cannot be null"),
        ("~retrieval.topk", "cannot be deleted"),
    ],
)
@pytest.mark.parametrize("stage", ["challenger", "serve_search"])
def test_a_key_or_value_that_is_not_allowed_is_refused(stage, override, said):
    assert said in refusal(stage, override)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("prepare_data.rows", -5, "at least 1"),
        ("prepare_data.hop_ratio", "4:3:2:1", "whole numbers at least 0: write hop_ratio=[4,3,2,1]"),
        ("prepare_data.hop_ratio", [4, -3], "a list of whole numbers at least 0"),
        ("prepare_data.indexing.device", "gpu", "cpu, cuda, cuda:N or mps, or null"),
        ("merge.log_level", "verbose", "one of DEBUG, INFO, WARNING, ERROR"),
        ("merge.run.name", "../../etc", "letters from A to Z, digits"),
        ("merge.run.name", "", "letters from A to Z, digits"),
        ("merge.compute.max_usd", "lots", "a number at least 0, or null"),
        ("merge.compute.timeout", "4h", "a whole number at least 1"),
        ("evaluate.benchmarks", "my.parquet", "a list of texts: write benchmarks=[my.parquet]"),
        ("evaluate.benchmarks", "[a{1}.csv]", 'write each text of it in quotes, benchmarks=["…","…"]'),
        ("evaluate.retrieval.port", 22, "at least 1024"),
        ("synthesize.val_share", 0, "is 0, not a number above 0 and at most 0.9"),
        ("synthesize.val_share", 1, "is 1, not"),
        ("synthesize.gates.evidence", "perhaps", "is 'perhaps', not true or false"),
    ],
)
def test_a_value_is_refused_by_the_type_of_its_key(key, value, said):
    stage, _, name = key.partition(".")
    fault = schema_of(stage)[name].fault(value)
    assert fault is not None and said in fault


def test_the_gates_settings_come_from_the_config():
    config = resolve(compose_stage("synthesize", ["gates.evidence=false", "gates.max_answer_words=4"]))
    assert gate_settings(config) == GateSettings(evidence=False, max_answer_words=4)


def test_a_stage_without_verl_takes_no_new_key_but_in_a_mapping_of_ours():
    assert "`drzero config` lists the keys" in refusal("merge", "+foo=1")
    assert "did you mean 'hardware'?" in refusal("merge", "hardwear=cpu")
    assert "'gates.evidence'" in refusal("synthesize", "+gates.evidenze=true")
    assert compose_stage("merge", ["hardware=cpu", "+process_env.A=1"]).process_env.A == 1


@pytest.mark.parametrize("stage", WITHOUT_VERL)
@pytest.mark.parametrize("hardware", ["cpu", "8xh100"])
def test_a_stage_without_a_trainer_has_our_keys_alone(stage, hardware):
    config = resolve(compose_stage(stage, [f"hardware={hardware}", "debug=hang"]))
    found = set(leaves(OmegaConf.to_container(config)))
    assert found == set(schema_of(stage).keys)


def leaves(node, name=""):
    if isinstance(node, dict) and name not in {key.name for key, _ in all_keys()}:
        return [leaf for part, inner in node.items() for leaf in leaves(inner, f"{name}.{part}".strip("."))]
    return [name]


def test_what_is_not_ours_in_a_training_stage_is_known_as_verls():
    config = compose_stage("solver", ["hardware=cpu"])
    ours = {name.partition(".")[0] for name in schema_of("solver").keys}
    assert set(config) - ours < verl.ROOTS


@pytest.mark.parametrize(
    "override",
    ["trainer.save_freq=1", "+trainer.foo=1", "data.train_batch_size=4", "mode=sync", "~trainer.logger"],
)
def test_a_stage_without_a_trainer_ignores_overrides_of_verls_part(override):
    plain = compose_stage("merge", ["hardware=cpu"])
    assert compose_stage("merge", ["hardware=cpu", override]) == plain


@pytest.mark.parametrize(("verls", "ours"), verl.ALIASES.items())
def test_a_verl_key_that_follows_ours_sets_ours(verls, ours):
    value = "cpu" if verls.endswith("device") else 3
    for stage in ("challenger", "evaluate"):
        config = compose_stage(stage, ["hardware=8xh100", f"{verls}={value}"])
        assert OmegaConf.select(config, ours) == value
        assert OmegaConf.select(config, verls) == (value if stage == "challenger" else None)


@pytest.mark.parametrize("hardware", ["cpu", "single_gpu", "8xh100"])
@pytest.mark.parametrize("stage", ["challenger", "evaluate"])
def test_the_demo_environment_brings_its_model_on_every_hardware(stage, hardware):
    config = compose_stage(stage, ["env=demo", f"hardware={hardware}"])
    assert Path(config.base_model).name == "demo-policy"
    chosen = compose_stage(stage, ["env=demo", f"hardware={hardware}", "model=qwen2.5-3b"])
    assert chosen.base_model == "Qwen/Qwen2.5-3B-Instruct"


def test_what_changes_an_answer_what_a_run_keeps_and_what_its_pace_depends_on_is_known():
    answer = (
        "prompts.form retrieval.topk retrieval.response_limit solver.engine solver.dtype solver.temperature "
        "solver.max_turns solver.max_tokens_per_turn solver.max_context_tokens solver.server_args "
        "question_fields.question question_fields.answers question_fields.documents"
    )
    run = (
        "base_model method iteration data.train_files data.train_batch_size open_book_check hop_check "
        "balance_hops train_rows environment.name environment.options environment.max_turns "
        "environment.call_form"
    )
    pace = (
        "base_model method data.train_batch_size data.max_response_length compute.type "
        "actor_rollout_ref.rollout.n trainer.n_gpus_per_node trainer.nnodes trainer.device machine.serve_gpus"
    )
    assert set(schema_of("evaluate").changing_journal()) == set(answer.split())
    assert (set(run_keys()), set(pace_keys())) == (set(run.split()), set(pace.split()))
    for key, _ in all_keys():
        assert set(key.limits.journal) <= set(key.limits.results), key.name


def test_limits_are_those_of_the_code_that_reads_the_keys():
    assert MAX_TOPK == SERVED_TOPK
    schema = schema_of("synthesize")
    assert {field.name: field.default for field in fields(GateSettings)} == {
        name.removeprefix("gates."): key.default
        for name, key in schema.keys.items()
        if name.startswith("gates.") and name not in ("gates.benchmarks", "gates.open_book_model")
    }


def test_a_key_is_printed_with_all_that_is_known_of_it_and_an_unknown_one_refused(capsys):
    run_config(["trainer.nnodes"])  # by veRL's name
    run_config(["solver.attempts"])
    run_config(["rows"])
    printed = capsys.readouterr().out
    for part in ("machine.nodes", "trainer.nnodes", "Attempts per question", "at least 2", "challenger"):
        assert part in printed
    assert "38400 (prepare-data), 40 (preview, warm-start)" in printed
    with pytest.raises(NoSuchKey, match=r"retrieval\.topk"):
        run_config(["topk"])
