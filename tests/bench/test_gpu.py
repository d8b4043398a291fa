"""The bench of one GPU, as far as it goes without one: what it runs, what it leaves, how it continues."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from bench import gpu
from bench.gpu import PIECES, Result, arguments, chosen, page, peaks
from drzero.preflight.model_shape import KNOWN, config_of
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage


def record(piece: str, step_s: float, code: int = 0) -> Result:
    """Three steps, the first of them slow."""
    steps = (
        [{"timing_s/step": 100.0}, {"timing_s/step": step_s}, {"timing_s/step": step_s}] if not code else []
    )
    memory = {"rollout": 9.5}, {"rollout": 11.0, "update": 3.0, "weight sync": 2.0}
    return Result(
        piece, "a GPU", code, 60.0, 40.0, *memory, "1 min", steps, "", "out of memory" if code else ""
    )


SHAPE = "qwen2.5-3b"


@pytest.fixture
def work(tmp_path):
    """A work folder that has a model of real size, by its architecture alone."""
    folder = tmp_path / "models" / SHAPE
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(KNOWN[f"{SHAPE}-instruct"])))
    return tmp_path


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_composes_and_its_memory_is_known_before_it_runs(name, work):
    piece = PIECES[name]
    config = compose_stage(piece.stage, arguments(name, work, "single_gpu", None, SHAPE))
    assert config.actor_rollout_ref.rollout.name == piece.engine
    assert config.data.train_batch_size == piece.batch
    assert config.trainer.v1.trainer_mode == ("sync" if "stock" in name else f"drzero_{config.method}_sync")
    report = preflight(config, piece.stage)
    # Each of eight GPUs has an eighth of a model's training state. One has all of it, next to a solver.
    limit = 141 if name == "real-size-challenger" else 80
    assert report.ledger and 0 < report.ledger.total(report.ledger.worst) < limit
    # What `prepare` makes, and SGLang, are not here; nothing else may be missing.
    missing = {"base_model", "data.train_files", "chroma.path", "actor_rollout_ref.rollout.name"}
    assert {finding.key for finding in report.findings if finding.severity == "error"} <= missing


def test_a_model_of_real_size_has_the_settings_of_eight_gpus_and_the_demos_prompts(work):
    config = compose_stage("solver", arguments("real-size-solver", work, "single_gpu", None, SHAPE))
    eight = compose_stage("solver", ["hardware=8xh100", f"model={SHAPE}"])
    assert config.prompts.form == "short" and config.base_model.endswith(f"models/{SHAPE}")
    assert (config.machine.gpus, eight.machine.gpus) == (1, 8)
    for key in (
        "actor_rollout_ref.actor.fsdp_config",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "data.max_response_length",
    ):
        assert OmegaConf.select(config, key) == OmegaConf.select(eight, key), key


def test_its_page_compares_our_trainer_with_veRLs_without_the_first_step():
    text = page([record("reference-solver", 11.0), record("stock-solver", 10.0)])
    assert "`reference-solver` takes 1.10 times one of `stock-solver`" in text
    assert "| 9.5 / 11.0 | nan / 3.0 |" in text and "60 s, estimated 1 min" in text and "| 40 | 60 |" in text


def test_memory_is_counted_for_the_phase_that_the_trainer_was_in():
    beats = [{"time": 10.0 * number, "phase": phase} for number, phase in enumerate(("start-up", "rollout"))]
    beats += [{"time": 20.0, "phase": "update"}, {"time": 30.0, "phase": "weight-sync"}]
    samples = [(5.0, 90.0), (10.0, 40.0), (19.9, 50.0), (20.0, 30.0), (35.0, 20.0)]
    assert peaks(samples, beats) == {"rollout": 50.0, "update": 30.0, "weight sync": 20.0}


def test_a_failed_piece_is_named_with_its_reason_and_has_no_figures():
    text = page([record("reference-solver", 11.0), record("stock-solver", 0, code=1)])
    assert "`stock-solver` failed: out of memory" in text and "times one of" not in text


def test_finished_pieces_are_not_run_again_and_the_page_has_all(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "synthesize_iter1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "synthesize_iter1" / "val.parquet").touch()
    (tmp_path / "records").mkdir()
    for name in PIECES:
        (tmp_path / "records" / f"{name}.json").write_text(json.dumps(asdict(record(name, 10.0))))
    monkeypatch.setattr(sys, "argv", ["gpu", "--work", str(tmp_path), "--page", str(tmp_path / "gpu.md")])
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert gpu.main() == 0
    assert all(f"| {name} |" in (tmp_path / "gpu.md").read_text() for name in PIECES)


def test_a_piece_that_fails_is_recorded_and_run_again_by_the_next_call(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints" / "synthesize_iter1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "synthesize_iter1" / "val.parquet").touch()
    command = ["gpu", "--work", str(tmp_path), "--hardware", "cpu", "reference-solver"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu.main() == 1
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["reference-solver.failed.json"]
    assert "`reference-solver` failed: no output" in capsys.readouterr().out


def test_pieces_of_an_engine_that_is_not_installed_are_left_out_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--work", str(tmp_path / "work"), "real-size-solver"])
    assert gpu.main() == 1
    assert list(chosen([], "single_gpu")) == [name for name in PIECES if PIECES[name].engine == "reference"]
    assert "stock-solver" not in chosen([], "cpu")
    told = capsys.readouterr().out
    assert "real-size-solver: SGLang is not installed here" in told
    assert "sglang-challenger: SGLang is not installed here" in told


@pytest.mark.slow("a run of three steps; the rest of the script is tested in the first tier")
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_piece_runs_without_a_gpu_and_leaves_its_record(tmp_path, speaking_model):
    gpu.prepare(tmp_path)
    policy = tmp_path / "corpus" / "models" / "demo-policy"
    shutil.rmtree(policy)
    shutil.copytree(speaking_model, policy)
    command = [sys.executable, "-m", "bench.gpu", "--hardware", "cpu", "--batch", "4", "--work"]
    run = subprocess.run([*command, str(tmp_path), "reference-solver"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    made = Result(**json.loads((tmp_path / "records" / "reference-solver.json").read_text()))
    assert len(made.steps) == gpu.STEPS
    for key in (*gpu.PHASES.values(), *gpu.CHECKS.values()):
        assert any(key in step for step in made.steps), key
    # Without a GPU the peak is the whole machine's, on which other tests run too.
    assert made.peak_gib["update"] > 0.5 and max(made.ledger_gib.values()) > 0.5
