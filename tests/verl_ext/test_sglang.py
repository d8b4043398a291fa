"""The list of SGLang's names that a run needs, against veRL's and our own code, and packages on disk.

tests/compat/test_sglang_wheel.py compares the list with the published wheel.
"""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import solver_spec
from verl_ext.server_arguments import as_words, sglang_arguments
from verl_ext.sglang.compat import NEEDS, PINNED, ROLLOUT, SERVER, SOLVER_ARGUMENTS
from verl_ext.sglang.source import Source

# veRL imports these for features that no recipe uses: adapters served as such, delta checkpoints, metrics of
# the rollout engine, the replay of expert routing.
OTHER_USES = {
    "sglang.srt.managers.io_struct:LoadLoRAAdapterFromTensorsReqInput",
    "sglang.srt.utils.patch_torch:monkey_patch_torch_reductions",
    "sglang.srt.model_executor.model_runner:LocalSerializedTensor",
    "sglang.srt.model_executor.model_runner_components.weight_updater:LocalSerializedTensor",
    "sglang.srt.utils.common:add_prometheus_middleware",
    "sglang.srt.layers.moe.routed_experts_capturer:extract_routed_experts_from_meta_info",
}
# veRL imports this from versions before 0.5.10 only.
FOR_OLDER_VERSIONS = {"sglang.srt.entrypoints.http_server:_launch_subprocesses"}


@pytest.fixture(scope="module")
def gpu_config():
    return resolve(compose_stage("challenger", ["hardware=8xh100", "solver.port=8001"]))


def verl_modules():
    spec = find_spec("verl")
    for name in ("async_sglang_server", "http_server_engine", "sglang_rollout"):
        file = Path(spec.origin).parent / "workers" / "rollout" / "sglang_rollout" / f"{name}.py"
        yield ast.parse(file.read_text(encoding="utf-8"))


def verl_uses():
    """`module:name` of everything that veRL's SGLang rollout takes from SGLang."""
    for node in (node for tree in verl_modules() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sglang.srt.entrypoints.engine":
            yield f"sglang.srt.entrypoints.engine:{node.attr}"


def verl_server_arguments():
    """The arguments that veRL always gives its SGLang server."""
    for node in (node for tree in verl_modules() for node in ast.walk(tree)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "args":
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("veRL no longer gathers the arguments in `args`")


def used_by(part, kind):
    return {need.name for need in NEEDS if (need.by, need.kind) == (part, kind)}


def test_the_list_has_the_names_that_verl_imports():
    # A need may name an attribute of an import.
    listed = {re.sub(r"(:[^.]*)\..*", r"\1", name) for name in used_by(ROLLOUT, "symbol")}
    uses = set(verl_uses())
    assert listed == uses - OTHER_USES - FOR_OLDER_VERSIONS
    # These broke older recipes.
    assert not {use.partition(":")[2] for use in uses} & {"get_ip", "maybe_set_triton_cache_manager"}


def test_the_list_has_the_arguments_that_verl_passes(gpu_config):
    ours = gpu_config.actor_rollout_ref.rollout.engine_kwargs.sglang
    assert used_by(ROLLOUT, "argument") == verl_server_arguments() | set(ours)
    assert ours.sleep_on_idle is True  # idle schedulers leave their cores to the update


def test_verl_starts_its_server_with_the_platforms_environment():
    # So verl_ext/rollout/platforms.py keeps the trainer's recorder out of the engine.
    environments = {
        ast.unparse(keyword.value)
        for tree in verl_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "runtime_env"
    }
    assert any("**get_platform().rollout_env_vars()" in environment for environment in environments)


def test_the_list_has_the_solvers_arguments_routes_and_metric(gpu_config):
    command = solver_spec(gpu_config).command
    assert set(as_words(SOLVER_ARGUMENTS, sglang_arguments())) <= set(command)
    flags = {word.removeprefix("--").replace("-", "_") for word in command if word.startswith("--")}
    assert flags == used_by(SERVER, "argument")
    spec = solver_spec(gpu_config)
    routes = {"/" + url.rpartition("/")[2] for url in (spec.health_url, spec.liveness.url)}
    assert routes == used_by(SERVER, "route") and set(spec.liveness.work) == used_by(SERVER, "metric")


def test_the_solver_gets_the_attention_kernels_of_verls_server():
    # When veRL drops its rule, ours can go too.
    (rule,) = {
        ast.unparse(node.test)
        for tree in verl_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "'flashinfer'" in ast.unparse(node.body)
        and "version" in ast.unparse(node.test)
    }
    assert rule == "version.parse(sglang.__version__) >= version.parse('0.5.12')"
    assert Version(PINNED) >= Version("0.5.12")
    assert SOLVER_ARGUMENTS["attention_backend"] == "flashinfer"


def package(folder, files):
    """An SGLang with these modules, by their paths."""
    for name, text in files.items():
        path = folder / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "sglang"


STATEMENTS = ["def wanted(): ...", "class wanted: ...", "wanted = 1", "wanted: int = 1"]
STATEMENTS += ["from elsewhere import other as wanted"]
STATEMENTS += ["try:\n    from a import wanted\nexcept ImportError:\n    wanted = None"]
STATEMENTS += ["if True:\n    pass\nelse:\n    wanted = 1", "\ufeffwanted = 1"]


@pytest.mark.parametrize("text", STATEMENTS)
def test_a_name_is_found_in_any_statement(tmp_path, text):
    assert Source(package(tmp_path, {"srt/m": text})).symbol("sglang.srt.m:wanted")


@pytest.mark.parametrize(
    "text", ["def f():\n    wanted = 1", "# wanted", "x = 'wanted'", "import wanted_too"]
)
def test_a_missing_name_is_not_found(tmp_path, text):
    assert not Source(package(tmp_path, {"srt/m": text})).symbol("sglang.srt.m:wanted")


def test_a_name_is_followed_through_star_imports_and_classes(tmp_path):
    modules = {
        "srt/utils/common": "class Thing:\n    tags: list = None\n    def run(self): ...",
        "srt/utils/__init__": "from sglang.srt.utils.common import *",
        "srt/user": "from sglang.srt.utils.common import Thing",
    }
    source = Source(package(tmp_path, modules))
    assert source.symbol("sglang.srt.utils:Thing")
    assert source.symbol("sglang.srt.user:Thing.tags") and source.symbol("sglang.srt.user:Thing.run")
    assert not source.symbol("sglang.srt.user:Thing.other")
    assert not source.symbol("sglang.srt.gone:Thing")


@pytest.mark.parametrize(
    "files",
    [
        {"srt/server_args": "parser.add_argument('--tp-size', '--tensor-parallel-size')"},
        {"srt/server_args": "class ServerArgs:\n    tp_size: int = 1"},
        {"srt/server_args": "", "srt/arg_groups/fields/parallel": "class Fields:\n    tp_size: int = 1"},
    ],
)
def test_an_argument_is_found_in_every_way_to_declare_it(tmp_path, files):
    source = Source(package(tmp_path, files))
    assert source.argument("tp_size") and not source.argument("dp_size")


def test_an_installed_sglang_is_refused_in_one_line_and_never_imported(tmp_path):
    modules = {"__init__": "raise RuntimeError('imported')", "srt/server_args": "class ServerArgs: ..."}
    package(tmp_path, modules)
    metadata = tmp_path / "sglang-0.5.12.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.12\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = run(environment, "-m", "verl_ext.sglang.compat")
    (line,) = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    lacks = "it lacks symbol sglang.srt.entrypoints.EngineBase"
    assert line.startswith(f"SGLang 0.5.12 does not fit veRL 0.9.1: {lacks}")
    assert line.endswith("install sglang==0.5.12")


def run(environment, *arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_list_is_read_without_sglang_verl_or_torch():
    script = "import sys, verl_ext.sglang.compat; print({'sglang', 'verl', 'torch'} & set(sys.modules))"
    assert run(os.environ, "-c", script).stdout == "set()\n"
