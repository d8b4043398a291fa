"""Synthesis: samples that survive kills, prompts that are each judged once, data fit for a solver.

Sampling is driven against scripted peers; one run is the real stage with a model that knows the protocol by
heart (`tiny_model.save_speaking_model`). In the second tier it is killed and run again.
"""

import asyncio
import io
import json
import random
import re
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_pairs import last_turn, pair, prompt, record, search
from omegaconf import DictConfig, OmegaConf
from test_merge import merger_in_this_process, save_run, state_of
from transformers import AutoTokenizer

from data.errors import DataError
from data.examples import Examples
from data.gates import Gates, GateSettings
from data.journal import Journal
from data.parquet_io import write_training_rows
from data.selection import Selection, select
from drzero.cli import main
from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.inputs import check_prompts, partition_rows
from drzero.preflight.machine import Machine
from drzero.recipe.compose import compose_plain, compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint
from drzero.stages.models import StageModel, completions_url
from drzero.stages.open_book import ask_solver, verdicts
from drzero.stages.result import read_result
from drzero.stages.synthesize import (
    generator_name,
    merge_if_needed,
    missing_samples,
    passing_pairs,
    play_samples,
    print_report,
    run_synthesize,
    sample_seed,
    synthesis_report,
)
from verl_ext.method.search_calls import render_tool_call

QUESTION = "<question>Who founded the town?</question><answer>Vell</answer>"


RUN_LIMIT_S = 300
FILES = ("train.parquet", "val.parquet", "rejects.jsonl", "report.json")
JUDGING = ("evidence", "hops", "integrity", "duplicates", "near_duplicates")
"""The gates that nothing of the speaking model's passes."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def arguments(prepared, speaking_model, checkpoints):
    """The stage as a user would ask for it, over 12 of the 60 prompts."""
    overrides = [*prepared.overrides(checkpoints, speaking_model), f"challenger={speaking_model}"]
    # Few at a time, so that a kill finds some done and some not.
    return [*overrides, "solver.concurrency=8", *(f"gates.{gate}=false" for gate in JUDGING)]


@pytest.fixture(scope="module")
def base(arguments):
    """The stage as composed; composing takes seconds."""
    return resolve(compose_stage("synthesize", arguments))


@pytest.fixture
def config(base, tmp_path):
    """A copy with a run folder of its own."""
    copy = cast(DictConfig, OmegaConf.create(OmegaConf.to_container(base)))
    copy.run.dir = str(tmp_path / "tiny")
    return copy


@pytest.fixture(scope="module")
def tokenizer(speaking_model):
    return AutoTokenizer.from_pretrained(speaking_model)


def rows_of(config, count):
    return partition_rows(config)[:count]


def says(text):
    return {"choices": [{"text": text, "finish_reason": "stop"}]}


def library(request):
    passage = {"title": "Vell", "text": "A founder.", "contents": "Vell\nA founder."}
    return {"result": [[passage] for _ in request["queries"]]}


def serve(config, start_peer, model, search=library):
    """Let peers stand in for the two services; returns what gives the requests that the model has seen."""
    peers = {"solver": start_peer("/v1/completions", model), "retrieval": start_peer("/retrieve", search)}
    for name, peer in peers.items():
        config[name].port = urlsplit(peer.url).port
    return lambda: peers["solver"].requests


def play(config, tokenizer, rows, path):
    """Play what the journal at `path` lacks; returns what failed and the journal's records."""
    with Journal(path, {"work": "this"}) as journal:
        missing = missing_samples(config, rows, journal.records)
        model = StageModel("challenger", "", "", completions_url(config), tokenizer)
        failed = asyncio.run(play_samples(config, model, missing, journal, ServiceGroup([])))
        return failed, journal.records


def keys(records):
    return sorted((record["prompt_index"], record["sample"]) for record in records)


@pytest.mark.parametrize("hardware", ["cpu", "single_gpu", "8xh100"])
def test_samples_are_drawn_as_the_challenger_was_trained_by_a_server_that_has_the_machine(hardware):
    composed = resolve(compose_plain("synthesize", [f"hardware={hardware}", "paths.checkpoints=runs"]))
    trained = resolve(compose_plain("challenger", [f"hardware={hardware}"]))
    solver, rollout = composed.solver, trained.actor_rollout_ref.rollout
    assert solver.temperature == rollout.temperature == 1.0
    assert solver.max_turns == rollout.multi_turn.max_assistant_turns
    assert solver.max_tokens_per_turn == trained.rollout.max_tokens_per_turn
    assert solver.max_context_tokens == trained.data.max_prompt_length + trained.data.max_response_length
    assert solver.model_path == "runs/challenger_iter1_hf"
    assert (solver.mem_fraction_static, solver.threads) == (0.8, 1)
    assert (composed.partitions, composed.samples) == (5, 5)


def test_seeds_fit_63_bits_are_unique_differ_by_run_and_match_existing_journals():
    of_run = {seed: {sample_seed(seed, p, n) for p in range(200) for n in range(5)} for seed in (1, 2)}
    assert len(of_run[1]) == 1000 and all(0 <= seed < 2**63 for seed in of_run[1])
    assert not of_run[1] & of_run[2]
    assert sample_seed(42, 7, 2) == 3865306493070812723


def test_the_partitions_share_out_the_prompts_every_fifth_row_each_and_there_are_no_others(config):
    for config.partition in range(1, 6):
        dealt = [row["extra_info"]["index"] for row in partition_rows(config)]
        assert dealt == list(range(config.partition - 1, 60, 5))
    for config.partition in (0, 6, -1):
        with pytest.raises(CheckError, match=f"no partition {config.partition} of 5.*partitions="):
            partition_rows(config)


def test_every_sample_of_every_prompt_is_journalled_once_with_its_seed(
    config, tokenizer, start_peer, tmp_path
):
    seen = serve(config, start_peer, lambda _: says(QUESTION))
    rows, path = rows_of(config, 3), tmp_path / "samples.jsonl"
    play(config, tokenizer, rows[:2], path)
    kept = path.read_bytes()
    failed, records = play(config, tokenizer, rows, path)
    wanted = [(row["extra_info"]["index"], number) for row in rows for number in range(5)]
    assert failed == [] and keys(records) == wanted and path.read_bytes().startswith(kept)
    seeds = {key: sample_seed(config.data.seed, *key) for key in wanted}
    assert {(r["prompt_index"], r["sample"]): r["seed"] for r in records} == seeds
    assert sorted(request["seed"] for request in seen()) == sorted(seeds.values())


def test_a_record_holds_the_conversation_and_what_it_cost(config, tokenizer, start_peer, tmp_path):
    call = render_tool_call(["Vell"])
    seen = serve(config, start_peer, lambda r: says(QUESTION if "A founder" in shown(tokenizer, r) else call))
    config.samples = 1
    _, (record,) = play(config, tokenizer, rows_of(config, 1), tmp_path / "samples.jsonl")
    assert [turn["text"] for turn in record["trajectory"]["turns"]] == [call, QUESTION]
    assert record["trajectory"]["turns"][0]["calls"][0]["response"] == "[1] Vell: A founder."
    assert record["tokens_in"] == sum(len(request["prompt"]) for request in seen())
    assert record["tokens_out"] > 0 and record["latency_s"] >= 0


def shown(tokenizer, request):
    return str(tokenizer.decode(request["prompt"]))


def test_a_conversation_with_a_failed_search_is_no_sample(config, tokenizer, start_peer, tmp_path):
    rows, path = rows_of(config, 5), tmp_path / "samples.jsonl"
    indices = [row["extra_info"]["index"] for row in rows]
    config.retrieval.deadline_s, config.samples = 0.2, 1
    lost, call = sample_seed(config.data.seed, indices[0], 0), render_tool_call(["Vell"])
    serve(config, start_peer, lambda r: says(call if r["seed"] == lost else QUESTION), lambda _: 503)
    (failed,), records = play(config, tokenizer, rows, path)
    assert failed.job.seed == lost and "a search failed: " in failed.reason
    assert keys(records) == [(index, 0) for index in indices[1:]]


def rewrite_prompts(config, folder, change):
    """Point the config to a copy of the prompts file with something changed."""
    config.partitions, config.partition, kept = 1, 1, (config.partitions, config.partition)
    rows = partition_rows(config)
    change(rows)
    config.partitions, config.partition = kept
    config.data.train_files = str(folder / "changed.parquet")
    write_training_rows(folder / "changed.parquet", rows)


@pytest.mark.parametrize(("field", "value"), [("doc_id", "unheard-of"), ("document", "Another town.")])
def test_prompts_about_documents_of_another_corpus_are_refused_naming_both(config, tmp_path, field, value):
    def foreign(rows):
        for row in rows:
            row["extra_info"][field] = value

    rewrite_prompts(config, tmp_path, foreign)
    here = CheckContext(config, "synthesize", Machine(True, True, None, 0, 1, None), True, False, Readings())
    with pytest.raises(CheckError) as refused:
        check_prompts(here)
    for part in (str(tmp_path / "changed.parquet"), "'corpus'", config.chroma.path, "prepare-data"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("change", "partition", "said"),
    [
        (lambda rows: rows[5]["extra_info"].update(index=0), 1, r"several rows with extra_info\.index 0"),
        (lambda rows: rows.__delitem__(slice(2, None)), 3, "2 rows, so partition 3 of 5 is empty"),
    ],
)
def test_prompts_of_one_index_and_a_partition_without_a_row_are_refused(
    config, tmp_path, change, partition, said
):
    rewrite_prompts(config, tmp_path, change)
    config.partition = partition
    with pytest.raises(CheckError, match=said):
        partition_rows(config)


def test_a_prompts_file_of_another_project_is_refused_naming_what_it_lacks(config, tmp_path):
    table = pq.read_table(config.data.train_files)
    place = table.schema.get_field_index("extra_info")
    info = pa.array([{"index": index, "split": "train"} for index in range(len(table))])
    pq.write_table(table.set_column(place, "extra_info", info), tmp_path / "foreign.parquet")
    config.data.train_files = str(tmp_path / "foreign.parquet")
    with pytest.raises(CheckError, match=r"foreign\.parquet .*extra_info.document is missing"):
        run_synthesize(config)


def test_a_folder_without_a_challenger_is_refused_before_anything_starts(config, tmp_path):
    config.challenger = str(tmp_path)
    with pytest.raises(CheckError, match="neither a model folder nor a run with a checkpoint"):
        run_synthesize(config)
    assert not (Path(config.run.dir) / "logs").exists()


def test_an_export_is_served_as_it_is_and_named_in_the_pairs(config, tmp_path):
    assert merge_if_needed(config) == config.challenger
    export = tmp_path / "challenger_iter1_hf"
    export.mkdir()
    config.paths.checkpoints, config.challenger = str(tmp_path), str(export)
    assert generator_name(config, "0123456789abcdef") == "challenger_iter1_hf@0123456789ab"


def test_a_challenger_that_is_a_run_is_merged_into_the_stages_own_folder_first(
    config, speaking_model, tmp_path
):
    run = save_run(tmp_path / "challenger_iter1", speaking_model, state_of(speaking_model))
    config.challenger, config.run.export_dir = str(run), f"{config.run.dir}/challenger_hf"
    with merger_in_this_process():
        model = Path(merge_if_needed(config))
    assert model.parent == Path(config.run.dir)
    assert (model / "model.safetensors").is_file()


def records_in(path):
    """The whole records of a journal, which may be growing."""
    lines = path.read_bytes().splitlines(keepends=True)[1:] if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


@pytest.fixture(scope="module")
def finished(arguments, checkpoints):
    """The folder of the real stage and what it printed. Another process would take ten seconds of imports."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["synthesize", *arguments])
    assert code == 0, out.getvalue()[-3000:]
    return SimpleNamespace(folder=checkpoints / "tiny", out=out.getvalue())


def prompts_in(folder):
    """The prompts that the accepted rows are of, and those of the rejects file."""
    tables = [pq.read_table(folder / name) for name in FILES[:2]]
    accepted = [info["index"] for table in tables for info in table["extra_info"].to_pylist()]
    lines = (folder / "rejects.jsonl").read_text().splitlines()
    return accepted, [json.loads(line)["prompt_index"] for line in lines]


def test_a_finished_stage_has_each_sample_and_prompt_once_and_says_so(finished):
    wanted = [(index, number) for index in range(0, 60, 5) for number in range(5)]
    assert keys(records_in(finished.folder / "samples.jsonl")) == wanted
    accepted, rejected = prompts_in(finished.folder)
    assert accepted and sorted([*accepted, *rejected]) == list(range(0, 60, 5))
    assert f"{len(accepted)} of 12 prompts gave a pair" in finished.out
    result = read_result(finished.folder)
    records = records_in(finished.folder / "samples.jsonl")
    assert set(result.outputs) == {"train", "val", "rejects"}
    assert all(path.is_file() for path in result.outputs.values())
    assert result.tokens == sum(record["tokens_in"] + record["tokens_out"] for record in records)
    assert not list(finished.folder.glob(".*.tmp"))


def test_the_end_shows_accepted_and_rejected_questions_with_why_and_where_the_answer_stands(finished):
    kept = json.loads((finished.folder / "report.json").read_text())
    shown = Examples.from_dict(kept["examples"])
    assert len(shown.accepted) == 3 and len(shown.rejected) == min(3, kept["rejected"])
    for one in (*shown.accepted, *shown.rejected):
        assert f"{one.question or '–'} → {one.answer or '–'}" in finished.out
        assert one.reason in finished.out and one.evidence


def test_fewer_samples_can_be_judged_later_and_without_a_pair_only_the_reasons_are_left_and_shown(
    finished, config, capsys
):
    config.samples = 2
    folder = judge_again(config, finished.folder)
    report = json.loads((folder / "report.json").read_text())
    assert (report["samples"], report["missing_samples"]) == (24, 0)
    config.gates.integrity = True
    with pytest.raises(DataError, match=r"no pair was accepted from 12 prompts.*rejects\.jsonl"):
        run_synthesize(config)
    rejects = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert sorted(reject["prompt_index"] for reject in rejects) == list(range(0, 60, 5))
    reasons = [reason for reject in rejects for sample in reject["samples"] for reason in sample["reasons"]]
    assert any(reason.startswith("integrity: ") for reason in reasons)
    assert not any((folder / name).exists() for name in ("train.parquet", "val.parquet", "result.json"))
    out = capsys.readouterr().out
    assert "accepted: none" in out and "integrity: " in out.partition("rejected")[2]


def test_a_row_says_where_it_comes_from(finished, speaking_model):
    by_seed = {record["seed"]: record for record in records_in(finished.folder / "samples.jsonl")}
    for row in pq.read_table(finished.folder / "train.parquet").to_pylist():
        metadata, info = row["metadata"], row["extra_info"]
        record = by_seed[metadata["seed"]]
        assert record["prompt_index"] == info["index"]
        assert record["trajectory"] == json.loads(metadata["trajectory"])
        assert metadata["document_sha256"] == sha256(info["document"].encode()).hexdigest()
        assert metadata["generator_checkpoint"] == f"speaking@{fingerprint(speaking_model)[:12]}"


def judge_again(config, samples):
    """Run the stage on a finished run's samples, shuffled, in a new folder: nothing is left to sample."""
    folder = Path(config.run.dir)
    folder.mkdir()
    header, *lines = (samples / "samples.jsonl").read_bytes().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    (folder / "samples.jsonl").write_bytes(b"".join([header, *lines]))
    run_synthesize(config)
    return folder


def test_the_same_samples_give_the_same_bytes_in_any_order_without_any_service(
    finished, config, tmp_path, monkeypatch
):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "announced.jsonl"))
    folder = judge_again(config, finished.folder)
    for name in FILES:
        assert (folder / name).read_bytes() == (finished.folder / name).read_bytes(), name
    assert not (folder / "logs").exists()
    lines = (tmp_path / "announced.jsonl").read_text().splitlines()
    assert [Path(json.loads(line)["path"]).name for line in lines] == [*FILES, "result.json"]


def test_questions_of_a_benchmark_file_are_kept_out(finished, config, tmp_path):
    chain = {"id": "a", "hop": 1, "question": "Who came?", "answer": "Vell"}
    (tmp_path / "chains.jsonl").write_text(json.dumps(chain) + "\n")
    config.gates.benchmarks = [str(tmp_path / "chains.jsonl")]
    with pytest.raises(DataError, match="no pair was accepted"):
        judge_again(config, finished.folder)
    assert "contamination: " in (Path(config.run.dir) / "rejects.jsonl").read_text()


def test_near_duplicates_are_found_by_the_runs_embedder(finished, config):
    config.gates.near_duplicates, config.gates.near_duplicate_cosine = True, 0.99
    folder = judge_again(config, finished.folder)
    # The model knows one question, which a draw may garble; a single pair leaves none to validate on.
    tables = [pq.read_table(path) for path in folder.glob("*.parquet")]
    accepted = [row["extra_info"]["question"] for table in tables for row in table.to_pylist()]
    assert accepted.count("Who came?") == 1
    report = json.loads((folder / "report.json").read_text())
    assert report["gates"]["near_duplicates"]["refused"] > 0


def test_the_solver_is_asked_with_what_the_challenger_read_and_once(config, tokenizer, start_peer, tmp_path):
    right, wrong = pair(answer="Tesk"), pair("Which sea is it?", "Galmir", search(), index=1, hop=2)

    def reads(request):
        prompt = shown(tokenizer, request)
        assert "lies on the river Galmir" in prompt
        in_passage = "Galmir: Galmir is a river that rises in the region of Tesk." in prompt
        return says(f"<answer>{'nothing' if in_passage else 'the Tesk'}</answer>")

    seen = serve(config, start_peer, reads)
    config.solver.max_turns, config.solver.temperature = 1, 0.0
    with Journal(tmp_path / "open_book.jsonl", {"work": "this"}) as journal:
        model = StageModel("solver", "", "", completions_url(config), tokenizer)
        ask = ask_solver(config, model, [right, wrong], journal, ServiceGroup([]))
        assert asyncio.run(ask) == []
        found = verdicts([right, wrong, pair(index=2)], journal.records)
    assert [request["temperature"] for request in seen()] == [0.0, 0.0]
    assert found[0, 0] is None
    assert found[1, 0] == "open_book: from what the challenger read, the solver answers 'nothing'"
    assert "rerun to ask" in (found[2, 0] or "")


def test_what_an_earlier_start_asked_counts_when_one_fails(config, tokenizer, start_peer, tmp_path):
    serve(config, start_peer, lambda request: 500)
    config.run.max_failed_share = 0.25
    with Journal(tmp_path / "open_book.jsonl", {"work": "this"}) as journal:
        for index in range(3):
            journal.append({"prompt_index": index, "sample": 0, "answer": "the Tesk"})
        model = StageModel("solver", "", "", completions_url(config), tokenizer)
        failed = asyncio.run(ask_solver(config, model, [pair(index=3)], journal, ServiceGroup([])))
    assert len(failed) == 1  # one of four, which is not too many


def test_only_pairs_that_pass_the_other_gates_are_asked():
    gates = Gates(GateSettings(near_duplicates=False))
    good, bad = record(last_turn()), record(last_turn("Drosken lies there."), sample=1)
    assert [each.sample for each in passing_pairs([bad, good], [prompt()], gates)] == [0]


@pytest.mark.slow("serves a second model")
def test_pairs_that_the_served_solver_reads_otherwise_are_refused_and_its_answers_counted(
    finished, config, speaking_model, tmp_path
):
    # As if every other prompt's answer were one that the solver does not know.
    header, *lines = (finished.folder / "samples.jsonl").read_text().splitlines(keepends=True)
    other = [
        line.replace("<answer>Vell<", "<answer>Tesk<") if json.loads(line)["prompt_index"] % 2 else line
        for line in lines
    ]
    (tmp_path / "samples.jsonl").write_text("".join([header, *other]))
    config.gates.open_book, config.gates.open_book_model = True, str(speaking_model)
    folder = judge_again(config, tmp_path)
    report = json.loads((folder / "report.json").read_text())
    reasons = re.findall(r"open_book: from what the challenger read", (folder / "rejects.jsonl").read_text())
    assert report["open_book"]["answers"] == report["gates"]["open_book"]["judged"] == report["pairs"]
    assert 0 < len(reasons) <= report["gates"]["open_book"]["refused"]
    assert report["open_book"]["tokens_in"] > 0


def test_samples_of_other_work_are_not_mixed_in(finished, config):
    config.data.seed = 7
    with pytest.raises(DataError, match=r"other work: data\.seed was 42 and is 7"):
        judge_again(config, finished.folder)


def test_a_report_without_a_benchmark_says_so_where_contamination_is_counted(config, capsys):
    rows = rows_of(config, 1)
    report = synthesis_report(rows, [], select({}, rows, Gates(GateSettings(near_duplicates=False))), 5)
    assert report["gates"]["contamination"] == {"judged": 0, "refused": 0, "note": "no benchmark given"}
    print_report(report, "tiny")
    assert re.search(r"contamination +0 +0 +no benchmark given", capsys.readouterr().out)


def test_a_report_counts_the_samples_that_services_have_spoiled(config):
    rows = rows_of(config, 3)
    record = {"tokens_in": 5, "tokens_out": 2, "latency_s": 1.5}
    records = [{"prompt_index": rows[0]["extra_info"]["index"], "sample": n, **record} for n in range(5)]
    records.append({"prompt_index": rows[1]["extra_info"]["index"], "sample": 3, **record})
    report = synthesis_report(rows, records, Selection([], [], {}), 5)
    assert (report["missing_samples"], report["prompts_without_sample"]) == (9, 1)
    assert (report["tokens_in"], report["tokens_out"], report["conversation_s"]) == (30, 12, 9.0)
