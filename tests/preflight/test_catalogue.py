"""Broken configurations, by subject in `broken/`, and the recipes as they ship.

A case has the command that is typed (`run`), what is damaged, and the finding that must come: its severity,
its key, and words in it.
"""

import json
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from _pytest.mark import ParameterSet
from conftest import unused_port
from families import family
from hypothesis import given
from hypothesis import strategies as st
from loopback_hub import NO_HUB, LoopbackHub
from omegaconf import DictConfig
from preflight_world import World, save_model_folder, write_prompts
from transformers import AutoTokenizer

from data.parquet_io import TRAINING_SCHEMA
from drzero.ops.resources.cgroup import memory_limit
from drzero.ops.resources.cuda import Device, Sight
from drzero.ops.resources.gpu import GpuSample
from drzero.preflight import compute as compute_checks
from drzero.preflight import cuda as cuda_checks
from drzero.preflight import environment as environment_checks
from drzero.preflight import machine, ray_cluster, versions
from drzero.preflight.context import Readings
from drzero.preflight.finding import Severity
from drzero.preflight.memory_ledger import loading_gib, offloaded_gib, weights_backup_gib
from drzero.preflight.model_shape import KNOWN, config_of, load_shape, shape_of
from drzero.preflight.run import STAGES, Report, preflight, refused_override
from drzero.preflight.values import LOGGERS, PRECISIONS, concerns_verl
from drzero.recipe.compose import CONFIG_DIR, resolve
from drzero.recipe.overrides import OverrideError
from search.chroma.location import connect

BROKEN: dict[str, dict[str, Any]] = {
    f"{file.stem}: {name}": case
    for file in sorted((Path(__file__).parent / "broken").glob("*.yaml"))
    for name, case in yaml.safe_load(file.read_text(encoding="utf-8")).items()
}
SHIPPED = {
    "8xh100": ["qwen2.5-3b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"],
    "single_gpu": ["qwen2.5-3b", "smollm2-135m", "demo-policy"],
    "cpu": ["smollm2-135m", "demo-policy"],
}
"""Models by the hardware profile that they ship for; docs/preflight.md has the table."""
MODELLED = ("challenger", "synthesize", "solver", "train", "evaluate")
PLAYED = ["env=wordle"]
"""What train is in, which needs an environment."""


@pytest.fixture(scope="module")
def world(tmp_path_factory, prepared):
    return World(tmp_path_factory.mktemp("world"), prepared.corpus, prepared.model)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch):
    """No secrets, and no other programs in memory."""
    monkeypatch.setattr(machine, "memory_free", memory_limit)
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def form_of(groups: list[str], said: str | None = None) -> str:
    """How prompts are worded for the model of these groups."""
    small = any(group in ("hardware=cpu", "compute=cpu") for group in groups) or any(
        name in group for group in groups for name in ("smollm2", "demo")
    )
    return said or ("short" if small else "full")


def damage_model(world: World, folder: Path, change: Callable[[Path], Any]) -> None:
    save_model_folder(folder / "model", world.model, KNOWN["demo-policy"])
    change(folder / "model")


def write_template(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)


def write_calls_as_xml(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    ours = """{"name": ' ~ function.name | tojson ~ ', "arguments": '"""
    assert ours in template
    write_template(model, template.replace(ours, "<function=' ~ function.name ~ '>'"))


def save_family(name: str, model: Path) -> None:
    family(AutoTokenizer.from_pretrained(model), name).save_pretrained(model)


def lose_shard(model: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def foreign_prompts(world: World, folder: Path) -> None:
    rows = pq.read_table(world.prompts("short")).to_pylist()
    for row in rows:
        row["extra_info"]["doc_id"] = "elsewhere"
    write_prompts(folder / "foreign.parquet", rows, "short")


def huge_index(_: World, folder: Path) -> None:
    vectors = folder / "chromadb" / "segment" / "data_level0.bin"
    vectors.parent.mkdir(parents=True)
    with vectors.open("wb") as file:
        file.truncate(600 * 10**9)  # it takes no room


def index_of_more_than_memory(world: World, folder: Path) -> None:
    shutil.copytree(world.corpus / "chromadb", folder / "chromadb")
    with connect(folder / "chromadb") as client:
        handle = client.get_collection("corpus", embedding_function=None)
        handle.modify(metadata={**(handle.metadata or {}), "chunks": 10**9})


def corpus_of_more_than_the_disk(_: World, folder: Path) -> None:
    with (folder / "huge.jsonl").open("wb") as file:
        file.truncate(10**13)  # it takes no room


def another_run(_: World, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "run" / "resolved.yaml").write_text("base_model: elsewhere")


def agent_of_ones_own(_: World, folder: Path) -> None:
    (folder / "own.py").write_text("async def agent(task, endpoint):\n    return 1.0\n")
    (folder / "tasks.jsonl").write_text('{"question": "Where is Vell?"}\n' * 100)


def exam_of_signs(_: World, folder: Path) -> None:
    answers = "Which?,C++\nHow cold?,-5\nTrue?,True\nWhich grade?,A\nWho?,Vell\n"
    (folder / "exam.csv").write_text(f"question,answer\n{answers}")


MODEL_DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{name: partial(save_family, name) for name in ("mistral", "llama3", "gemma")},
    "template without tools": lambda model: write_template(model, "{{ messages[0].content }}"),
    "template of another call format": write_calls_as_xml,
    "missing shard": lose_shard,
    "cut-off weights": lambda model: (model / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{"),
    "broken config.json": lambda model: (model / "config.json").write_text("{"),
}
DAMAGE: dict[str, Callable[[World, Path], Any]] = {
    **{name: partial(damage_model, change=change) for name, change in MODEL_DAMAGE.items()},
    "parquet without columns": lambda world, folder: pq.write_table(
        pq.read_table(world.prompts("short")).drop_columns(["prompt"]), folder / "bare.parquet"
    ),
    "text for parquet": lambda _, folder: (folder / "text.parquet").write_text("no parquet"),
    "parquet without rows": lambda _, folder: pq.write_table(
        TRAINING_SCHEMA.empty_table(), folder / "empty.parquet"
    ),
    "foreign prompts": foreign_prompts,
    "another run": another_run,
    "an agent": agent_of_ones_own,
    "exam of signs": exam_of_signs,
    "huge index": huge_index,
    "index of more than memory": index_of_more_than_memory,
    "corpus of more than the disk": corpus_of_more_than_the_disk,
}


def judge(world: World, case: dict[str, Any], places: dict[str, str]) -> Report:
    stage, *typed = shlex.split(case["run"])
    groups = [word for word in typed if (CONFIG_DIR / f"{word.replace('=', '/')}.yaml").is_file()]
    overrides = [word.format(**places) for word in typed if word not in groups]
    try:
        config = world.config(stage, groups, form_of(groups, case.get("form")), overrides)
    except OverrideError as refused:
        return refused_override(stage, refused)
    # A damaged folder is the case's own, so what was read of the shared ones stays true.
    readings, starting = Readings() if "hub" in case else world.readings, case.get("starting", False)
    readings.sight = None  # another case's GPUs
    return preflight(config, stage, starting=starting, asks_verl=concerns_verl(overrides), readings=readings)


def hub_of(world: World, case: dict[str, Any]) -> AbstractContextManager[Any]:
    """A hub with the case's model and no weights, or none."""
    if "hub" not in case:
        return nullcontext()
    files = {file.name: file.read_bytes() for file in world.model.iterdir() if file.suffix != ".safetensors"}
    return LoopbackHub({case["hub"]: files}, port=NO_HUB)


def gpus_of(case: dict[str, Any]) -> list[GpuSample]:
    """What NVML is to tell."""
    return [
        GpuSample(place, int(one["used_gib"] * 1024), int(one["total_gib"] * 1024), 0, {one.get("pid", 1): 1})
        for place, one in enumerate(case["nvml"])
    ]


def sight_of(case: dict[str, Any]) -> Sight:
    """What torch is to see: by default all GPUs."""
    told = {"torch": "2.11.0", "cuda": "13.0", "available": True, "sees": case["gpus"]} | case.get(
        "sight", {}
    )
    return Sight(devices=(Device("H100"),) * told.pop("sees"), **told)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", b"\xff", "", '{"model_type": "llama"}'])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_file_of_a_model_is_an_error_of_its_key_that_names_it(world, tmp_path, name, content):
    def damage(model: Path) -> None:
        (model / name).write_bytes(content.encode() if isinstance(content, str) else content)

    damage_model(world, tmp_path, damage)
    config = world.config("evaluate", ["hardware=cpu"], "short", [f"solver.model_path={tmp_path / 'model'}"])
    found = [finding.why for finding in preflight(config, "evaluate", readings=world.readings).errors]
    assert len(found) == 1 and name in found[0] and "is damaged" in found[0]


@given(
    field=st.sampled_from([name for name in config_of(KNOWN["qwen3-8b"]) if name != "model_type"]),
    value=st.sampled_from([None, 0, -1, 1.5, "many", [], {}, True, 10**30]),
)
def test_sizes_are_positive_numbers_or_refused(field, value):
    try:
        shape = shape_of({**config_of(KNOWN["qwen3-8b"]), field: value})
    except ValueError as refused:
        assert field in str(refused)
    else:
        assert shape is not None and shape.parameters > 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_reported_with_its_key(world, tmp_path, monkeypatch, request, name):
    case = BROKEN[name]
    world.readings.out_of_reach.clear()  # a loop tells each of these models once, and all cases share it
    for variable, value in case.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    if "gpus" in case:
        for module in (machine, compute_checks, cuda_checks):
            monkeypatch.setattr(module, "gpus_here", lambda: case["gpus"])
        monkeypatch.setattr(cuda_checks, "look", lambda env: sight_of(case))
    if "nvml" in case:
        monkeypatch.setattr(compute_checks, "Gpus", lambda: SimpleNamespace(read=lambda: gpus_of(case)))
    if "unreadable" in case:
        monkeypatch.setattr(environment_checks, "why_unreadable", lambda: case["unreadable"])
    if "shm_free" in case:
        monkeypatch.setattr(ray_cluster, "shm_free", lambda: case["shm_free"])
    if "installed" in case:
        real = versions.installed
        monkeypatch.setattr(versions, "installed", lambda name: case["installed"].get(name, real(name)))
    if "damage" in case:
        DAMAGE[case["damage"]](world, tmp_path)
    if "hub" in case:
        request.getfixturevalue("fresh_hub")
    with socket.create_server(("127.0.0.1", 0)) as listener, hub_of(world, case):
        places = {
            "tmp": str(tmp_path),
            "corpus": str(world.corpus),
            "taken_port": str(listener.getsockname()[1]),
            "free_port": str(unused_port()),
        }
        report = judge(world, case, places)
    severity = next(one for one in Severity if one in case)
    ((key, says),) = case[severity].items()
    found = [finding for finding in report.findings if (finding.severity, finding.key) == (severity, key)]
    assert any(says in f"{finding.value} {finding}" for finding in found), report.findings


def test_a_batch_that_the_rows_do_not_fill_is_reported_once_for_what_is_left_of_them(world):
    keys = ["data.max_prompt_length=60", "data.filter_overlong_prompts=true", "data.train_batch_size=1000"]
    report = preflight(
        world.config("challenger", ["hardware=cpu"], "short", keys), "challenger", readings=world.readings
    )
    (said,) = (finding.why for finding in report.errors if "less than one batch" in finding.why)
    assert "without the 256 that are too long, has 0 rows" in said


def shipped() -> Iterator[ParameterSet]:
    """Every stage on every hardware with every model; stages without a model on every hardware.

    In the first tier the challenger with every model, and the other stages with one for each hardware.
    """
    rest = pytest.mark.slow("the first tier has each stage with a model, and each model in the challenger")
    for hardware, models in SHIPPED.items():
        for stage in STAGES:
            for model in models if stage in MODELLED else models[:1]:
                marks = [] if stage == "challenger" or model == models[0] else [rest]
                yield pytest.param(stage, hardware, model, marks=marks)


@pytest.mark.parametrize(("stage", "hardware", "model"), shipped())
def test_a_recipe_as_it_ships_has_no_errors(world, stage, hardware, model):
    # With the machine on Modal its host memory counts as well.
    groups = [f"{'compute' if hardware == '8xh100' else 'hardware'}={hardware}", f"model={model}"]
    groups += PLAYED if stage == "train" else []
    config = world.config(stage, groups, form_of(groups), [])
    report = preflight(config, stage, asks_verl=True, readings=world.readings)
    assert report.errors == []
    if (stage, hardware) == ("challenger", "8xh100"):
        # An engine takes no more GPUs than it needs where both share them.
        assert "solver.tp_size" not in {finding.key for finding in report.findings}
        assert documented_ledger(model) == ledger_row(model, resolve(config), report)
    assert report.ledger is not None or stage not in MODELLED


def documented_ledger(model: str) -> list[str]:
    """A model's row in the table of docs/preflight.md."""
    lines = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return next(row for row in rows if row[0] == f"`{model}`")


def ledger_row(model: str, config: DictConfig, report: Report) -> list[str]:
    """The same row, computed."""
    ledger, shape = report.ledger, load_shape(config.base_model)
    assert ledger is not None and shape is not None
    gpus = config.machine.gpus
    later = offloaded_gib(config, shape) + weights_backup_gib(config, shape, gpus)
    host = 24 + max(later, loading_gib(config, shape, gpus))
    totals = (*(ledger.total(phase) for phase in ("rollout", "update", "weight sync")), ledger.margin_gib)
    layout = f"{config.solver.tp_size} × {config.solver.dp_size}"
    return [f"`{model}`", layout, *(f"{gib:.1f}" for gib in totals), f"{host:.0f}"]


RECIPES = {
    "8xh100": "qwen2.5-7b",
    "4xa100-80gb": "qwen2.5-3b",
    "single_h100": "qwen2.5-3b",
    "a100-40gb": "smollm2-135m",
    "2xa10g": "smollm2-135m",
    "a10g": "smollm2-135m",
    "t4": "smollm2-135m",
    "cpu": "demo-policy",
}
"""A model for every machine on Modal, with which all stages run there."""
ENVIRONMENTS = sorted(path.stem for path in (CONFIG_DIR / "env").glob("*.yaml"))


def every_launch() -> Iterator[ParameterSet]:
    """Every environment on every machine in every stage, and what needs no corpus in one.

    In the first tier the challenger on every machine, and every stage in every environment.
    """
    rest = pytest.mark.slow("the first tier has each machine, stage and environment at least once")
    for place, compute in enumerate(RECIPES):
        for stage in STAGES:
            for env in ("wordle",) if stage in ("train", "agent_bench") else ENVIRONMENTS:
                of_machine = stage == "challenger" and env == ENVIRONMENTS[place % len(ENVIRONMENTS)]
                of_stage = stage != "challenger" and compute == "a10g"
                marks = [] if of_machine or of_stage else [rest]
                yield pytest.param(env, compute, stage, marks=marks, id=f"{env}-{compute}-{stage}")


def test_every_machine_has_a_recipe():
    own = {"local", "2x8xh100"}  # a cluster that one starts oneself: tests/preflight/test_preflight_nodes.py
    assert {*RECIPES, *own} == {path.stem for path in (CONFIG_DIR / "compute").glob("*.yaml")}


@pytest.mark.parametrize(("env", "compute", "stage"), every_launch())
def test_every_environment_composes_and_passes_preflight_on_every_machine_in_every_stage(
    world, env, compute, stage
):
    # An environment may bring its own model.
    model = [] if env == "demo" else [f"model={RECIPES[compute]}"]
    groups = [f"compute={compute}", f"env={env}", *model]
    config = world.config(stage, groups, "short" if env == "demo" else form_of(groups), [])
    assert env != "demo" or Path(config.base_model).name == "demo-policy"
    report = preflight(config, stage, readings=world.readings)
    # Several GPUs may cost more than a rehearsal may.
    is_dear = env == "demo" and compute in ("8xh100", "4xa100-80gb") and stage in (*MODELLED, "preview")
    # And all of an environment's steps on a rented CPU, which would take days.
    is_dear |= (stage, compute) == ("train", "cpu")
    assert {finding.key for finding in report.errors} <= ({"compute.max_usd"} if is_dear else set())
    assert report.machine is not None and report.machine.usd_per_hour > 0


def test_a_port_that_is_taken_here_says_nothing_of_a_machine_elsewhere(world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"retrieval.port={listener.getsockname()[1]}"
        config = world.config("challenger", ["compute=8xh100"], "full", [taken])
        report = preflight(config, "challenger", readings=world.readings)
    assert report.errors == []


def test_names_that_are_checked_without_verl_are_verls():
    from verl.utils.torch_dtypes import BFLOAT_LIST, FLOAT_LIST, HALF_LIST
    from verl.utils.tracking import Tracking

    assert set(LOGGERS) == set(Tracking.supported_backend)
    assert all(name in [*HALF_LIST, *FLOAT_LIST, *BFLOAT_LIST] for name in PRECISIONS)


def test_nothing_is_left_behind(world):
    before = sorted(path for path in world.root.rglob("*"))
    preflight(world.config("challenger", ["hardware=cpu"], "short", []), "challenger")
    assert sorted(path for path in world.root.rglob("*")) == before
    assert os.path.isdir(world.checkpoints) and shutil.disk_usage(world.checkpoints).free


@pytest.mark.parametrize("opens", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_a_template_that_opens_the_thinking_itself_is_noted(world, tmp_path, opens):
    def damage(model: Path) -> None:
        with (model / "chat_template.jinja").open("a") as template:
            template.write(f"{{{{ {opens!r} if add_generation_prompt else '' }}}}")

    damage_model(world, tmp_path, damage)
    config = world.config("evaluate", ["hardware=cpu"], "short", [f"solver.model_path={tmp_path / 'model'}"])
    report = preflight(config, "evaluate", readings=world.readings)
    assert not report.errors
    assert [one.severity for one in report.findings if repr(opens) in one.why] == ["note"]


@pytest.mark.parametrize(
    "words",
    [
        # The agent first: what is read for it must not be taken for the next one's.
        "agent={tmp}/own.py:agent tasks={tmp}/tasks.jsonl actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "env=wordle actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "env=wordle actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ],
)
def test_a_loss_over_rows_is_refused_only_where_an_episode_may_have_several(world, tmp_path, words):
    agent_of_ones_own(world, tmp_path)
    report = judge(world, {"run": f"train hardware=cpu {words}"}, {"tmp": str(tmp_path)})
    assert not [one for one in report.errors if one.key.startswith("actor_rollout_ref.actor")]
