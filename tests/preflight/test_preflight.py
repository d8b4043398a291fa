"""`drzero preflight`: what it prints, what it exits with, and what it leaves alone."""

import json
import logging
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import Prepared
from loopback_hub import NO_HUB, LoopbackHub
from terminal import terminal_as_stdout

from drzero.cli import main
from drzero.commands.models import state_and_size
from drzero.preflight import machine
from drzero.preflight.cost import Estimate
from drzero.preflight.finding import PreflightFailed, error, note, warning
from drzero.preflight.index_size import gib
from drzero.preflight.memory_ledger import Ledger
from drzero.preflight.model_shape import KNOWN, config_of
from drzero.preflight.report import print_reports
from drzero.preflight.run import Report
from drzero.recipe.errors import CheckError


def judged(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["preflight", *arguments]) == code
    return capsys.readouterr().out


def overrides(prepared: Prepared, folder: Path) -> list[str]:
    return [*prepared.overrides(folder), "data.train_batch_size=4", "run.min_free_gb=0.1"]


def test_a_run_that_can_start_ends_well_and_leaves_nothing(capsys, tmp_path, prepared):
    out = judged(capsys, 0, "challenger", *overrides(prepared, tmp_path))
    assert "it may start" in out and "GiB of the machine" in out
    assert list(tmp_path.iterdir()) == []


def judged_on_hub(capsys: pytest.CaptureFixture[str], prepared: Prepared, folder: Path) -> dict[str, Any]:
    """The report of a challenger with two models of the hub."""
    places = [f"paths.corpus={prepared.corpus}", f"paths.checkpoints={folder}"]
    on_hub = ["hardware=8xh100", "model=qwen3-8b", "retrieval.embedder=org/embedder"]
    (report,) = json.loads(judged(capsys, 2, "challenger", *places, *on_hub, "--json"))
    return report


@pytest.mark.usefixtures("fresh_hub")
@pytest.mark.parametrize("hub", [None, {"silent": True}, {"status": 503}], ids=["away", "silent", "failing"])
def test_a_hub_that_does_not_answer_is_tried_once_and_is_one_warning_next_to_the_ledger(
    capsys, caplog, monkeypatch, tmp_path, prepared, hub
):
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.setattr("drzero.ops.hub.TIMEOUT_S", 0.5)
    with ExitStack() as stack:
        running = hub and stack.enter_context(LoopbackHub({}, port=NO_HUB, **hub))
        report = judged_on_hub(capsys, prepared, tmp_path)
        assert not running or running.asked() == ["/"]
    (found,) = (finding for finding in report["findings"] if "does not answer" in finding["why"])
    assert (found["key"], found["severity"]) == ("base_model", "warning")
    assert "Qwen/Qwen3-8B (base_model, about 16 GB) and org/embedder (retrieval.embedder)" in found["why"]
    assert report["memory"]["capacity_gib"] > 0
    assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]


@pytest.mark.usefixtures("fresh_hub")
def test_a_model_that_the_hub_refuses_is_asked_for_once_and_is_one_error(capsys, tmp_path, prepared):
    with LoopbackHub({}, port=NO_HUB, status=403) as hub:
        report = judged_on_hub(capsys, prepared, tmp_path)
    assert hub.asked() == ["/", "/Qwen/Qwen3-8B/resolve/main/config.json"]
    (why,) = (finding["why"] for finding in report["findings"] if "403" in finding["why"])
    assert "there is no model at Qwen/Qwen3-8B" in why


LIST = '{{"weight_map": {{"a": "{0}-1.{1}", "b": "{0}-2.{1}"}}}}'
SHARDS, BINS = LIST.format("model", "safetensors"), LIST.format("pytorch_model", "bin")


@pytest.mark.usefixtures("fresh_hub")
@pytest.mark.parametrize(
    ("cached", "fault"),
    [
        ({"model.safetensors.index.json": SHARDS}, "lacks 2 of 2 weight files, e.g. model-1.safetensors"),
        ({"model.safetensors.index.json": SHARDS, "model-1.safetensors": "w"}, "lacks 1 of 2 weight files"),
        ({"pytorch_model.bin.index.json": BINS, "pytorch_model-2.bin": "w"}, "e.g. pytorch_model-1.bin"),
        ({"model.safetensors.index.json": "{"}, "whose list model.safetensors.index.json is damaged"),
        ({"model.safetensors.index.json": '{"weight_map": {}}'}, "json is empty"),
        ({"README.md": "it"}, "holds no weights"),
        ({"pytorch_model.bin.index.json": BINS, "model.safetensors": "w"}, None),
        (
            {"model.safetensors.index.json": SHARDS, "model-1.safetensors": "w", "model-2.safetensors": "w"},
            None,
        ),
        ({"0_Transformer/pytorch_model.bin": "w"}, None),
    ],
)
def test_an_interrupted_download_is_no_model(capsys, tmp_path, prepared, cached, fault):
    model = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    for name, text in {"config.json": json.dumps(config_of(KNOWN["qwen3-8b"])), **cached}.items():
        file = model / "snapshots" / "0" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0")
    has_weights = any(text == "w" for text in cached.values())
    state, _ = state_and_size("qwen3-8b", "Qwen/Qwen3-8B")
    partly = "incomplete, " if has_weights else ""
    assert state == (f"{partly}to be downloaded from the hub" if fault else "cached")
    report = judged_on_hub(capsys, prepared, tmp_path)
    (why,) = (finding["why"] for finding in report["findings"] if "does not answer" in finding["why"])
    assert ("Qwen/Qwen3-8B" in why) == (fault is not None) and (fault or "org/embedder") in why


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0.00 KiB"),
        (549000, "536 KiB"),
        (75000000.0, "71.5 MiB"),
        (25.5 * 2**30, "25.5 GiB"),
        (1200 * 2**30, "1,200 GiB"),
        (2**30 - 1, "1.00 GiB"),
    ],
)
def test_a_size_has_three_digits_in_a_unit_that_fits(size, shown):
    assert gib(size) == shown


@pytest.mark.parametrize(
    ("text", "severity", "why"),
    [
        (
            "የሥነ ፈለክ ምርምር ተቋሙ በ1904 ተመሠረተ።",
            "error",
            "100% of the letters of the first 2 documents",
        ),
        ("Обсерватория была основана в 1904 году.", "warning", "reads the words letter by letter"),
        ("Die Sternwarte wurde 1904 gegründet.", None, ""),
    ],
)
@pytest.mark.parametrize("stage", ["prepare-data", "preview"])
def test_an_embedder_that_cannot_read_the_source_is_named_before_anything_is_indexed(
    capsys, tmp_path, stage, text, severity, why
):
    lines = (json.dumps({"id": str(n), "text": text}) for n in range(2))
    (tmp_path / "source.jsonl").write_text("\n".join(lines))
    source = [f"source={tmp_path / 'source.jsonl'}", f"paths.corpus={tmp_path}", "hardware=cpu"]
    words = [*source, "retrieval.embedder=packaged-minilm", "endpoint=http://127.0.0.1:9/v1", "--json"]
    main(["preflight", stage, *(words if stage == "preview" else [*words[:4], "--json"])])
    (report,) = json.loads(capsys.readouterr().out)
    found = [f for f in report["findings"] if "letter" in f["why"]]
    assert [f["severity"] for f in found] == ([severity] if severity else [])
    assert all(why in f["why"] and "docs/languages.md" in f["fix"] for f in found)


def test_json_says_all_of_it(capsys, tmp_path, prepared):
    faults = ["run.min_free_gb=1000000", "chroma.collection=papers"]
    (report,) = json.loads(judged(capsys, 2, "challenger", *overrides(prepared, tmp_path), *faults, "--json"))
    assert (report["stage"], report["may_start"]) == ("challenger", False)
    errors = {f["key"]: f for f in report["findings"] if f["severity"] == "error"}
    assert errors.keys() == {"run.min_free_gb", "chroma.path"}
    assert float(errors["run.min_free_gb"]["value"]) == 1e6
    assert set(errors["run.min_free_gb"]) == {"severity", "key", "value", "why", "fix"}


def test_a_stage_that_nobody_knows_is_refused_with_those_there_are(capsys):
    assert main(["preflight", "tune"]) == 2
    assert "challenger" in capsys.readouterr().err


def test_a_loop_is_judged_stage_by_stage_without_missing_what_it_will_make(capsys, tmp_path, prepared):
    common = [override for override in overrides(prepared, tmp_path) if not override.startswith("run.name")]
    stages = [f"stages.evaluate.benchmarks=[{prepared.corpus / 'chains.jsonl'}]", "iterations=1"]
    reports = json.loads(judged(capsys, 0, "evolve", *common, *stages, "--json"))
    assert [report["stage"] for report in reports] == [
        "evaluate_iter0",
        *(f"{stage}_iter1" for stage in ("challenger", "synthesize", "solver", "merge", "evaluate")),
        "evolve",
    ]
    known = [report["estimate"]["low_s"] for report in reports[:-1] if report["estimate"]]
    assert reports[-1]["estimate"]["low_s"] == pytest.approx(sum(known), abs=len(known))


def test_what_a_loop_has_finished_costs_nothing_any_more(capsys, tmp_path, prepared):
    common = [override for override in overrides(prepared, tmp_path) if not override.startswith("run.name")]
    done = {name: {"state": "complete"} for name in ("challenger_iter1", "synthesize_iter1", "solver_iter1")}
    (tmp_path / "evolve").mkdir()
    (tmp_path / "evolve" / "manifest.json").write_text(json.dumps({"stages": done}))
    choices = ["evaluations=false", "iterations=1", "--json"]
    *_, merge, together = json.loads(judged(capsys, 0, "evolve", *common, *choices))
    assert together["estimate"]["high_s"] == merge["estimate"]["high_s"]


def test_no_secret_is_shown(capsys, tmp_path, prepared, monkeypatch):
    secrets = {"WANDB_API_KEY": "your-planted-0123", "HF_TOKEN": "hf_planted_0456"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    out = judged(capsys, 2, "challenger", *overrides(prepared, tmp_path), "--json")
    assert "WANDB_API_KEY" in out
    assert not [value for value in secrets.values() if value in out]


def test_an_exception_carries_its_findings_and_says_all_of_them():
    findings = [error("a.b", "is wrong", "set it to 2"), error("c", "is unset", "set it")]
    failed = PreflightFailed(findings)
    assert isinstance(failed, CheckError) and failed.findings == findings
    assert str(failed) == "2 errors:\n  a.b: is wrong: set it to 2\n  c: is unset: set it"
    assert str(PreflightFailed(findings[:1])) == "a.b: is wrong: set it to 2"


KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
FIVE = [
    note("versions", "the machine of the run needs verl 0.9.1", value="not checked here"),
    error(KEY, "8 devices cannot be divided into engines of 3", f"set {KEY}=2, a divisor of 8", value=3),
    warning("run.min_free_gb", "the disk of /a/long/path has 61.4 GB free\x1b[2J", "make room", value=200),
    error("chroma.path", "no Chroma folder at " + "/a/very/long/path" * 6, ""),
    error("data.train_batch_size", "250 is no multiple of 16", "change it", value=250),
]
LEDGER = Ledger(79.2, {"rollout": {"contexts": 1.2, "solver: share": 20.0}, "update": {"actor: Adam": 7.1}})


ERRORS_AND_WARNING = [
    "challenger",
    "",
    f"  error  {KEY} = 3",
    "    why  8 devices cannot be divided into engines of 3",
    f"    fix  set {KEY}=2, a divisor of 8",
    "  error  chroma.path",
    "    why  no Chroma folder at " + "/a/very/long/path" * 6,
    "  error  data.train_batch_size = 250",
    "    why  250 is no multiple of 16",
    "    fix  change it",
    "",
    "warning  run.min_free_gb = 200",
    r"    why  the disk of /a/long/path has 61.4 GB free\x1b[2J",
    "    fix  make room",
    "",
]
VERDICT = ["", "preflight: 3 errors, 1 warning, 1 note: it must not start"]


def test_a_finding_in_a_pipe_is_a_block_of_whole_lines_and_notes_wait_until_asked_for(capsys):
    print_reports([Report("challenger", FIVE)])
    more = "   more  --all prints notes on versions, and tables of memory and time"
    assert capsys.readouterr().out.splitlines() == [*ERRORS_AND_WARNING, more, *VERDICT]
    print_reports([Report("challenger", FIVE)], everything=True)
    note_lines = [
        "   note  versions = not checked here",
        "    why  the machine of the run needs verl 0.9.1",
        "",
    ]
    assert capsys.readouterr().out.splitlines() == [*ERRORS_AND_WARNING, *note_lines, *VERDICT]


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_terminal_a_finding_is_wrapped_between_words_and_nothing_of_it_is_cut(
    capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    print_reports([Report("challenger", FIVE)])
    whole = capsys.readouterr().out.split()
    with terminal_as_stdout() as text:
        print_reports([Report("challenger", FIVE)])
        shown = text()
    assert "\x1b[1;31m  error\x1b[0m" in shown
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert shown.split() == whole
    *blocks, _ = shown.splitlines()
    # Only a word that is itself longer may leave the terminal.
    assert [line for line in blocks if len(line) > columns and len(line[9:].split()) > 1] == []


def test_the_worst_phase_of_all_stages_is_one_line_and_the_tables_follow_when_asked_for(capsys):
    tight = Ledger(79.2, {"rollout": {"contexts": 1.2}, "weight sync": {"contexts": 71.28}})
    estimate = Estimate(3600, 7200, "assumed: x", 10, detail="4 steps", advice="run 3")
    reports = [
        Report("challenger_iter1", [], ledger=LEDGER, estimate=estimate),
        Report("b", [], ledger=tight),
    ]
    print_reports([*reports, reports[0], Report("evolve", [], estimate=estimate)])
    assert capsys.readouterr().out.splitlines() == [
        "evolve",
        "",
        " memory  71.3 of 79.2 GiB of the machine (90%) in the worst phase: weight sync of b",
        "   time  60 min to 2.0 h, $10 to $20 ($10.00/h, rates of 2026-09-26), assumed: x; 4 steps; run 3",
        "   more  --all prints tables of memory and time",
        "",
        "preflight: nothing found: it may start",
    ]
    print_reports([*reports, reports[0], Report("evolve", [], estimate=estimate)], everything=True)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line != line.rstrip()] == []
    assert (
        sum("of 79.2 left in the worst phase" in line for line in printed) == 2
    )  # an equal ledger is not repeated
    lines = [" ".join(line.split()) for line in printed]
    assert "sum 21.2 7.1" in lines and "actor: Adam – 7.1" in lines
    assert "evolve 60 min to 2.0 h, $10 to $20 assumed: x; 4 steps" in lines


def test_a_problem_of_several_stages_is_told_once_with_their_names(capsys):
    def stage(name, *findings):
        return Report(name, list(findings))

    disk, file = (
        warning("run.min_free_gb", "full", "make room", 200),
        error("data.train_files", "none", "", "a"),
    )
    twice = [error("memory", "too little", "less", 1), error("memory", "and too tight", "less", 1)]
    print_reports(
        [
            stage("challenger_iter1", disk, file, *twice),
            stage("synthesize_iter1", warning("key", "full", "make room", 200), file),
            stage(
                "challenger_iter2", replace(disk, why="fuller"), error("data.train_files", "none", "", "b")
            ),
            stage("solver_iter1", disk, error("data.train_files", "no questions", "", "c")),
        ]
    )
    heads = [line for line in capsys.readouterr().out.splitlines() if line[:9] in ("  error  ", "warning  ")]
    assert heads == [
        "  error  data.train_files = a (challenger_iter1 and 2 more)",
        "  error  memory = 1 (challenger_iter1)",
        "  error  memory = 1 (challenger_iter1)",
        "  error  data.train_files = c (solver_iter1)",
        "warning  run.min_free_gb = 200 (challenger_iter1 and 3 more)",
    ]


# The demo's loop makes its corpus itself.
@pytest.mark.parametrize(
    ("loop", "code"), [("loop=full hardware=8xh100 model=qwen2.5-3b", 2), ("loop=demo hardware=cpu", 0)]
)
def test_a_loop_that_has_nothing_prepared_fits_one_screen(monkeypatch, loop, code):
    monkeypatch.setattr(machine, "memory_free", machine.memory_limit)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with TemporaryDirectory(dir="/tmp") as folder, terminal_as_stdout() as text:
        places = [f"paths.corpus={folder}/outputs/corpus", f"paths.checkpoints={folder}/outputs/checkpoints"]
        assert main(["preflight", "evolve", *loop.split(), *places]) == code
        shown = re.sub(r"\x1b\[[0-9;]*m", "", text()).splitlines()
    assert len(shown) <= 40 and "trainer.total_training_steps=3" in "".join(shown)
    assert ("For dollars set compute=" in "".join(shown)) == ("8xh100" in loop)
