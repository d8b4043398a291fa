"""Arguments of the model servers: the pinned SGLang's table, what a value may be, and the command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drzero.preflight.server_arguments import _OF_VLLM, ROLLOUTS_OWN, SERVERS_OWN
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import solver_spec
from verl_ext.server_arguments import (
    REFERENCE_ROLLOUT,
    REFERENCE_SERVER,
    TABLE,
    Argument,
    as_words,
    sglang_arguments,
)
from verl_ext.sglang.compat import NEEDS, PINNED
from verl_ext.sglang.read_arguments import as_text, read_arguments

ROOT = Path(__file__).parents[2]


def test_the_table_is_of_the_pinned_version_and_as_it_is_written():
    assert yaml.safe_load(TABLE.read_text(encoding="utf-8"))["version"] == PINNED
    assert TABLE.read_text(encoding="utf-8") == as_text(sglang_arguments(), PINNED)


def test_the_table_has_what_the_recipe_verl_and_our_hints_name():
    names = {need.name for need in NEEDS if need.kind == "argument"}
    assert {*names, *SERVERS_OWN, *ROLLOUTS_OWN, *_OF_VLLM.values()} <= set(sglang_arguments())
    # Else they would be no hints.
    assert not set(_OF_VLLM) & set(sglang_arguments())


VALUES = [("tool_call_parser", "hermes", None)]
VALUES += [("tool_call_parser", "hermse", "(did you mean 'hermes'?)"), ("page_size", 16, None)]
VALUES += [("page_size", True, "is True, not a whole number")]
VALUES += [("page_size", "16", "is '16', not a whole number"), ("mem_fraction_static", 1, None)]
VALUES += [("enable_mixed_chunk", 1, "is 1, not true or false"), ("cuda_graph_bs", [1, 2], None)]
VALUES += [("cuda_graph_bs", 1, "is 1, not a list"), ("revision", 7, None)]
VALUES += [("revision", {"a": 1}, "not text"), ("page_size", None, None)]


@pytest.mark.parametrize(("name", "value", "says"), VALUES)
def test_a_value_is_judged_by_kind_and_choices(name, value, says):
    fault = sglang_arguments()[name].fault(value)
    assert fault is None if says is None else says in (fault or "")


def test_arguments_become_words_and_nothing_for_what_is_off():
    given = {
        **{"page_size": 16, "enable_mixed_chunk": True, "disable_radix_cache": False, "revision": None},
        **{"cuda_graph_bs": [1, 2], "lora_strict_loading": False, "fp8_gemm_runner_backend": "triton"},
    }
    assert as_words(given, sglang_arguments()) == (
        *("--page-size", "16", "--enable-mixed-chunk", "--cuda-graph-bs", "1", "2"),
        *("--no-lora-strict-loading", "--fp8-gemm-backend", "triton"),
    )


@dataclasses.dataclass
class ServerArgs:
    """A small one in SGLang's form."""

    model_path: str = ""
    parser: str = "auto"
    sizes: list[int] | None = None
    strict: bool = False
    quick: bool = False
    extra: dict[str, Any] | None = None
    by_another_name: str = ""

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model", "--model-path", type=str)
        parser.add_argument("--parser", choices=["auto", "x"])
        parser.add_argument("--sizes", type=int, nargs="+")
        parser.add_argument("--strict", action=argparse.BooleanOptionalAction)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--extra", type=json.loads)
        parser.add_argument("--other", type=str, dest="by_another_name")
        parser.add_argument("--config", type=str)


def test_arguments_are_read_from_the_options_of_server_args():
    expected = {"model_path": Argument("text"), "parser": Argument("text", choices=("auto", "x"))}
    expected |= {"sizes": Argument("int", many=True), "strict": Argument("switch"), "quick": Argument("flag")}
    expected |= {"extra": Argument("json"), "by_another_name": Argument("text", option="--other")}
    assert read_arguments(ServerArgs) == expected


def test_the_reference_engines_arguments_are_those_that_its_code_reads():
    def constants(file, function):
        """The first arguments of a function's calls in a file."""
        calls = [
            node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Call)
        ]
        named = [call for call in calls if ast.unparse(call.func) == function]
        return {str(call.args[0].value) for call in named if isinstance(call.args[0], ast.Constant)}

    served = constants("verl_ext/engine/api_server.py", "parser.add_argument")
    assert {f"--{name.replace('_', '-')}" for name in REFERENCE_SERVER} <= served
    assert constants("verl_ext/rollout/reference_rollout.py", "options.get") == set(REFERENCE_ROLLOUT)


def test_they_reach_the_solvers_command_line_and_win_over_the_recipes_own():
    given = ["solver.server_args={attention_backend: triton, sleep_on_idle: false, page_size: 16}"]
    command = list(solver_spec(resolve(compose_stage("evaluate", ["hardware=8xh100", *given]))).command)
    assert command[command.index("--attention-backend") + 1] == "triton"
    assert command[command.index("--page-size") + 1] == "16"
    assert "--sleep-on-idle" not in command
    reference = ["hardware=cpu", "rollout=reference", "solver.server_args.seed=7"]
    command = list(solver_spec(resolve(compose_stage("evaluate", reference))).command)
    assert command[command.index("--seed") + 1] == "7"


@pytest.mark.parametrize(("hardware", "name"), [("8xh100", "sglang"), ("single_gpu", "reference")])
def test_the_rollouts_join_the_keywords_that_verl_passes_to_its_engine(hardware, name):
    config = compose_stage("solver", [f"hardware={hardware}", "rollout.server_args.threads=5"])
    passed = config.actor_rollout_ref.rollout.engine_kwargs[name]
    assert passed.threads == 5 and len(passed) > 1
