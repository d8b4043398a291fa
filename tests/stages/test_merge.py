"""The merge stage with veRL's real merger, on checkpoints written as its FSDP2 trainer writes them."""

import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from verl.model_merger import __main__ as merger

from drzero.checkpoints.verify import check_export
from drzero.checkpoints.weight_change import measure_change
from drzero.checkpoints.weights import FsdpCheckpoint
from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.errors import OutOfTime
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.recipe.compose import compose_stage
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint_checkpoint
from drzero.stages.merge import run_merge
from drzero.stages.result import read_result
from verl_ext.engine.loading import load_model

STEP, NORM = 4, "model.norm.weight"
pytestmark = pytest.mark.timeout(300)


@contextmanager
def rank_of(rank, world):
    """Be one of `world` processes, without the others: enough to make and pickle DTensors."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_run(run, model, state, world=1):
    """Write what veRL leaves of a run: one checkpoint of `world` shards, and the file that names its step."""
    actor = run / f"global_step_{STEP}" / "actor"
    actor.mkdir(parents=True)
    for rank in range(world):
        with rank_of(rank, world):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
            shards = {}
            for name, tensor in state.items():
                pieces = tensor.chunk(world)
                local = pieces[rank] if rank < len(pieces) else tensor[:0]
                shape, stride = tensor.shape, tensor.stride()
                shards[name] = DTensor.from_local(
                    local.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )
            torch.save(shards, actor / f"model_world_size_{world}_rank_{rank}.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    shutil.copytree(model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (run / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    return run


def state_of(model):
    """A model's weights under all their names, as the trainer has them: float32, tied ones twice."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in loaded.state_dict().items()}


def moved(state, by):
    """Every second weight changed."""
    result = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in result.values():
        half = tensor.view(-1)[::2]
        half.copy_(by(half))
    return result


def merge(checkpoints, start, *overrides):
    with merger_in_this_process():
        return run_merge(compose_stage("merge", arguments(checkpoints, start, *overrides)))


@contextmanager
def merger_in_this_process():
    """Run veRL's merger here: importing veRL takes nine seconds a process. Killed ones are real processes."""

    def run(command, services):
        assert command.command[:3] == (sys.executable, "-m", "verl.model_merger")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["merger", *command.command[3:]])
            merger.main()
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drzero.checkpoints.export.run_supervised", run)
        yield


def arguments(checkpoints, start, *overrides):
    roots = [f"paths.checkpoints={checkpoints}", f"base_model={start}"]
    return ["hardware=cpu", "model=demo-policy", *roots, *overrides]


class Merged(NamedTuple):
    """A finished merge of the solver's first iteration."""

    checkpoints: Path
    start: Path
    export: Path

    @property
    def run(self):
        return self.checkpoints / "solver_iter1"

    @property
    def report(self):
        return dict(json.loads((self.checkpoints / "merge_iter1" / "report.json").read_text()))


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny_model):
    """A start model on bf16 numbers, as those of the hub and earlier exports are."""
    folder = tmp_path_factory.mktemp("start") / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def merged(tmp_path_factory, start):
    """A run that moved every second weight by 1e-6, as a step at that learning rate does, merged."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    save_run(checkpoints / "solver_iter1", start, moved(state_of(start), lambda half: half + 1e-6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG_VARIABLE, str(checkpoints.with_suffix(".announced")))
        return Merged(checkpoints, start, merge(checkpoints, start))


def test_report_and_result_of_a_merge_are_written_and_announced(merged):
    lines = merged.checkpoints.with_suffix(".announced").read_text().splitlines()
    result = merged.checkpoints / "merge_iter1" / "result.json"
    assert [json.loads(line)["path"] for line in lines] == [str(merged.export), str(result)]
    config = compose_stage("challenger", arguments(merged.checkpoints, merged.start, "iteration=2"))
    assert str(merged.export) == config.solver.model_path
    check = merged.report["check"]
    weights = load_file(merged.start / "model.safetensors")
    assert check["weights"] == sum(tensor.numel() for tensor in weights.values())
    assert (check["texts"], check["skipped"]) == (4, None)
    assert 0 <= check["max_log_prob_difference"] <= 1e-4
    change = merged.report["change"]
    assert change["trained"]["share"] == change["exported"]["share"] == pytest.approx(0.5, abs=1e-6)
    assert change["trained"]["mean_abs"] == pytest.approx(5e-7, rel=0.01)
    assert change["kept"] == pytest.approx(1.0)
    result = read_result(merged.checkpoints / "merge_iter1")
    assert result.outputs == {"export": merged.export}
    assert result.figures["changed_share"] == merged.report["change"]["trained"]["share"]
    assert not (merged.run / "result.json").exists()


def test_a_merge_without_time_for_it_is_not_begun(start, tmp_path, monkeypatch):
    run = save_run(tmp_path / "solver_iter1", start, state_of(start))
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 55))
    with pytest.raises(OutOfTime, match="the export solver_iter1_hf was not started: the stop time"):
        merge(tmp_path, start)
    assert [path for path in tmp_path.iterdir() if path != run] == []


def test_the_export_is_complete_readable_and_has_the_checkpoints_weights(merged, tmp_path):
    files = {path.name for path in merged.export.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= files
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= files
    assert json.loads((merged.export / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (merged.export, merged.start))
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    model, _ = load_model(str(merged.export))
    assert model.generation_config.eos_token_id == theirs.eos_token_id
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in merged.export.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    model, _ = load_model(str(merged.export), dtype="float32")
    expected = moved(state_of(merged.start), lambda half: half + 1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    model = AutoModelForCausalLM.from_pretrained(merged.export, dtype="auto")
    assert model.dtype == torch.float32


def test_an_export_in_bfloat16_is_the_rounded_checkpoint_and_lost_the_step(tmp_path, merged):
    shutil.copytree(merged.run, tmp_path / "solver_iter1")
    export = merge(tmp_path, merged.start, "run.export_dtype=bfloat16")
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    expected = moved(state_of(merged.start), lambda half: half + 1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    change = json.loads((tmp_path / "merge_iter1" / "report.json").read_text())["change"]
    # Only weights so small that 1e-6 is more than half of the gap to the next bf16 number.
    assert 0 < change["exported"]["share"] < 0.01
    assert 0 < change["kept"] < 0.05


def test_a_second_merge_takes_the_export_that_is_there_and_clears_leftovers(merged):
    replaced = merged.checkpoints / ".solver_iter1_hf.previous"  # a kill just after the renames leaves it
    shutil.copytree(merged.export, replaced)
    before = (merged.export / "model.safetensors").stat()
    assert merge(merged.checkpoints, merged.start) == merged.export
    assert (merged.export / "model.safetensors").stat() == before
    assert {path.name for path in merged.checkpoints.iterdir()} == {
        *("solver_iter1", "solver_iter1_hf", "merge_iter1")
    }


def test_a_copied_tree_has_its_export_already_and_a_newer_checkpoint_replaces_it(tmp_path, merged):
    shutil.copytree(merged.checkpoints, tmp_path / "ck", copy_function=shutil.copyfile)  # with times of now
    before = (tmp_path / "ck" / "solver_iter1_hf" / "model.safetensors").stat()
    export = merge(tmp_path / "ck", merged.start)
    assert (export / "model.safetensors").stat().st_ino == before.st_ino
    shutil.rmtree(tmp_path / "ck" / "solver_iter1")
    state = moved(state_of(merged.start), lambda half: half * 1.02)
    save_run(tmp_path / "ck" / "solver_iter1", merged.start, state)
    export = merge(tmp_path / "ck", merged.start)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(export / "model.safetensors")[name], state[name])
    assert list((tmp_path / "ck").glob(".*")) == []


def test_one_changed_weight_is_another_checkpoint(tmp_path, merged):
    """In the middle of the shard, at the same size: only the checksum at its end differs."""
    state = moved(state_of(merged.start), lambda half: half + 1e-6)
    state["model.layers.0.self_attn.v_proj.weight"][0, 0] += 1
    run = save_run(tmp_path / "solver_iter1", merged.start, state)
    shard = Path("global_step_4", "actor", "model_world_size_1_rank_0.pt")
    assert (run / shard).stat().st_size == (merged.run / shard).stat().st_size
    first, second = (fingerprint_checkpoint(FsdpCheckpoint(each).folder) for each in (run, merged.run))
    assert first != second


def test_the_shards_of_two_processes_are_put_together(tmp_path, start):
    state = moved(state_of(start), lambda half: half * 1.02)
    save_run(tmp_path / "solver_iter1", start, state, world=2)
    exported, _ = load_model(str(merge(tmp_path, start)), dtype="float32")
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_an_adapter_is_added_to_the_weights(tmp_path, start):
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    wrapped = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    state = {name: tensor.detach().clone() for name, tensor in wrapped.state_dict().items()}
    run = save_run(tmp_path / "solver_iter1", start, state)
    meta = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    (run / f"global_step_{STEP}" / "actor" / "lora_train_meta.json").write_text(json.dumps(meta))
    exported, _ = load_model(str(merge(tmp_path, start)), dtype="float32")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        whole = wrapped.merge_and_unload()
        difference = (exported(ids).logits - whole(ids).logits).abs().max()
        from_base = (exported(ids).logits - load_model(str(start))[0](ids).logits).abs().max()
    assert difference < 1e-5 * from_base


# What is refused: one CheckError, and nothing half-written.


def copy_of(merged, place):
    """The run alone, to spoil."""
    shutil.copytree(merged.run, place / "solver_iter1")
    return place / "solver_iter1" / f"global_step_{STEP}" / "actor"


def other_model(place, start):
    shutil.copytree(start, place, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=49152, **sizes)).save_pretrained(place)
    return place


def spoil_missing_shard(actor):
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    (actor / "model_world_size_1_rank_0.pt").rename(actor / "model_world_size_2_rank_0.pt")


def spoil_cut_off(actor):
    shard = actor / "model_world_size_1_rank_0.pt"
    os.truncate(shard, shard.stat().st_size // 2)


def spoil_json(name, **values):
    """Set values in a file of a folder, those in a mapping one by one."""

    def spoil(folder):
        content = json.loads((folder / name).read_text())
        for key, value in values.items():
            content[key] = content[key] | value if isinstance(value, dict) else value
        (folder / name).write_text(json.dumps(content))

    return spoil


def spoil_model(**values):
    return spoil_json("huggingface/config.json", **values)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"global_step_4/actor is missing"),
        (spoil_missing_shard, r"lacks model_world_size_2_rank_1.pt: a checkpoint of 2 processes has 2"),
        (spoil_cut_off, r"model_world_size_1_rank_0.pt cannot be read as a checkpoint's shard"),
        (spoil_model(intermediate_size=256), r"mlp.down_proj.weight is \(64, 128\), not \(64, 256\)"),
        (
            lambda actor: (actor / "huggingface" / "config.json").unlink(),
            r"the checkpoint: no usable model config at .*huggingface",
        ),
        (spoil_json("fsdp_config.json", world_size=10**9), r"lacks model_world_size_1000000000_rank_0.pt"),
        (spoil_json("fsdp_config.json", world_size="2"), r"fsdp_config.json does not say world_size"),
        (spoil_model(num_attention_heads=0), r"no usable model config at .*ZeroDivision"),
        (spoil_model(vocab_size=-5), r"no model can be made from .*huggingface/config.json.*-5"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused(tmp_path, merged, spoil, message):
    spoil(copy_of(merged, tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckError, match=message):
        merge(tmp_path, merged.start)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ("{tmp}/other", [], r"of another model than the start model .*hidden_size is 64, not 32"),
        ("nobody/nothing", [], "there is no model at nobody/nothing"),
        ("{start}", ["run.min_free_gb=0"], r"has 0.00 GiB free and the export takes .*make room"),
    ],
)
def test_what_cannot_go_well_is_refused_before_the_merger_starts(
    tmp_path, merged, monkeypatch, model, overrides, said
):
    copy_of(merged, tmp_path / "ck")
    other_model(tmp_path / "other", merged.start)
    if "run.min_free_gb=0" in overrides:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr("drzero.checkpoints.export.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckError, match=said):
        merge(tmp_path / "ck", Path(model.format(tmp=tmp_path, start=merged.start)), *overrides)
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["solver_iter1"]


def test_a_folder_that_is_no_export_is_not_replaced(tmp_path, merged):
    copy_of(merged, tmp_path)
    (tmp_path / "solver_iter1_hf").mkdir()
    (tmp_path / "solver_iter1_hf" / "mine.txt").write_text("keep me")
    with pytest.raises(CheckError, match="is not our export"):
        merge(tmp_path, merged.start)
    assert (tmp_path / "solver_iter1_hf" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("hardware", ["cpu", "8xh100"])
def test_a_merge_needs_no_room_for_checkpoints(tmp_path, merged, hardware):
    config = compose_stage("merge", arguments(tmp_path, merged.start, f"hardware={hardware}"))
    assert config.run.min_free_gb < 1


# The check itself, on exports that are not what they should be.


def spoil_weights(change):
    def spoil(export):
        weights = load_file(export / "model.safetensors")
        change(weights)
        save_file(weights, export / "model.safetensors", metadata={"format": "pt"})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        # One bf16 step above 1.
        (spoil_weights(lambda weights: weights[NORM][3].add_(2**-7)), "is not the checkpoint's weight"),
        # Transformers would load it all the same, with a fresh one.
        (spoil_weights(lambda weights: weights.pop(NORM)), f"has no weight {NORM}"),
        (lambda export: (export / "generation_config.json").unlink(), "lacks generation_config.json"),
        (lambda export: (export / "chat_template.jinja").unlink(), "has no chat template"),
        (spoil_json("tokenizer.json", model={"merges": []}), "the tokenizer in .* differs from"),
        (spoil_json("config.json", rope_parameters={"rope_theta": 50.0}), "but not its log-probabilities"),
    ],
)
def test_an_export_that_is_not_the_checkpoint_is_found(tmp_path, merged, spoil, message):
    export = tmp_path / "export"
    shutil.copytree(merged.export, export)
    spoil(export)
    with pytest.raises(CheckError, match=message):
        check_export(FsdpCheckpoint(merged.run), export)


def test_weights_that_are_not_finite_are_found(tmp_path, merged):
    state = moved(state_of(merged.start), lambda half: half + 1e-6)
    state[NORM][0] = float("nan")
    run = save_run(tmp_path / "run", merged.start, state)
    with pytest.raises(CheckError, match=f"{NORM} holds values that are not finite"):
        check_export(FsdpCheckpoint(run), merged.export)


def test_a_model_larger_than_the_memory_is_compared_by_its_weights_alone(merged, monkeypatch):
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr("drzero.checkpoints.verify.psutil.virtual_memory", lambda: memory)
    check = check_export(FsdpCheckpoint(merged.run), merged.export)
    assert (check.texts, check.max_log_prob_difference) == (0, None)
    assert check.skipped is not None and "GiB of memory" in check.skipped


def test_a_model_that_did_not_move_says_so(tmp_path, merged):
    run = save_run(tmp_path / "run", merged.start, state_of(merged.start))
    change = measure_change(FsdpCheckpoint(run), merged.start, merged.start)
    assert (change.trained.share, change.exported.share, change.kept) == (0.0, 0.0, None)
