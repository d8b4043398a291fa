"""Environments on Modal: what `--env` takes, what follows from it, and the commands of the guide."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drzero.launch import environments
from drzero.launch.arguments import parse, parse_modal_run
from drzero.launch.environments import as_text, check_environment
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import ImageExtras, with_packages_of
from drzero.launch.request import Request, resolve
from drzero.ops.versions import pinned
from drzero.preflight.finding import Finding, Severity
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage
from environments.fault import SAME_PACKAGES

ROOT = Path(__file__).parents[2]
GENERAL = "config/runs/general.yaml"
WORDLE, BFCL = "config/runs/wordle.yaml", "config/runs/bfcl.yaml"
GUIDE = [
    # Its commands in its own order, on our file and with our run files.
    ("train --env wordle --steps 200", "wordle", 200),
    (
        "train --env vf-bfcl-single-turn --steps 500 --gpu-count 1 --gpu-type A100-40GB",
        "bfcl-single-turn",
        500,
    ),
    ("evaluate --env wordle --model Qwen/Qwen2.5-0.5B-Instruct --num-examples 50", "wordle", None),
    (f"train --config-path {GENERAL}", "wordle", 200),
    (f"train --config-path {WORDLE} --env vf-bfcl-single-turn", "bfcl-single-turn", 200),
    (f"train_with_config --config-path {GENERAL}", "wordle", 200),
    (f"train --config-path {GENERAL} --env gsm8k", "verifiers:gsm8k", 200),
    (f"train --config-path {GENERAL} --steps 1000", "wordle", 1000),
    (f"train --config-path {WORDLE}", "wordle", 200),
    (f"train --config-path {BFCL}", "bfcl-single-turn", 500),
    ("train --env vf-wordle --steps 500", "wordle", 500),
    ("evaluate --env wordle --model Qwen/Qwen2.5-0.5B-Instruct", "wordle", None),
    (f"train --config-path {GENERAL} --env vf-bfcl-single-turn", "bfcl-single-turn", 200),
    ("train --env vf-tool-test", "bfcl-single-turn", 200),
]


def function(line: str) -> Request:
    """What `modal run modal_train.py::LINE` launches."""
    words = parse_modal_run(["modal", "run", *shlex.split(f"modal_train.py::{line}")], "modal_train.py")
    assert words is not None
    return resolve(words)


def action(line: str) -> Request:
    """What `modal run modal_train.py --action LINE` launches."""
    return resolve(parse(["--action", *shlex.split(line)]))


def value(request: Request, key: str) -> str | None:
    """The last value that the command gives a key."""
    values = [word.partition("=")[2] for word in request.command if word.partition("=")[0] == key]
    return values[-1] if values else None


class TestTheGuidesCommands:
    @pytest.mark.parametrize(("line", "env", "steps"), GUIDE)
    def test_each_is_launched_as_it_stands(self, line, env, steps):
        request = function(line)
        stage = "evaluate" if line.startswith("evaluate") else "train"
        assert (request.action, request.command[0], request.env) == (stage, stage, env)
        assert value(request, "env") == env
        assert value(request, "steps") == (None if steps is None else str(steps))
        assert request.preflight and request.script is None
        machine = request.compute.modal_options()
        assert (machine["gpu"], machine["cpu"], machine["timeout"]) == ("A100-40GB:1", 8, 14400)
        # Loading an adapter on 3B takes 35 GiB, over the guide's 32 GB.
        assert machine["memory"] == (40960 if env == "bfcl-single-turn" else 32768)
        assert request.compute.max_usd is not None

    @pytest.mark.parametrize(
        ("line", "model"),
        [
            ("train --env vf-wordle", "Qwen/Qwen2.5-0.5B-Instruct"),
            (f"train --config-path {GENERAL} --env gsm8k", "Qwen/Qwen2.5-1.5B-Instruct"),
            (f"train --config-path {WORDLE} --env vf-bfcl-single-turn", "Salesforce/xLAM-2-3b-fc-r"),
            (f"train --config-path {BFCL}", "Salesforce/xLAM-2-3b-fc-r"),
            ("evaluate --env bfcl-multi-turn", "Salesforce/xLAM-2-3b-fc-r"),
            ("train --env vf-wordle --model me/mine-1B", "me/mine-1B"),
        ],
    )
    def test_an_environment_brings_a_model_that_suits_it(self, line, model):
        assert value(function(line), "base_model") == model

    @pytest.mark.parametrize(
        ("line", "form"),
        [
            (f"train --config-path {BFCL}", "xlam"),
            ("evaluate --env bfcl-multi-turn", "xlam"),
            ("evaluate --env bfcl-single-turn --model Qwen/Qwen2.5-3B-Instruct", "auto"),
            ("train --env textarena --model Salesforce/xLAM-2-3b-fc-r", "xlam"),
        ],
    )
    def test_calls_are_read_as_the_model_writes_them_whatever_the_environment(self, line, form):
        assert value(function(line), "environment.call_form") == form

    def test_an_evaluation_is_of_the_model_itself_in_a_folder_of_its_own(self):
        request = function("evaluate --env wordle --model Qwen/Qwen2.5-0.5B-Instruct --num-examples 50")
        config = compose_stage("evaluate", request.command[1:])
        assert (config.environment.name, config.num_examples) == ("wordle", 50)
        assert config.solver.model_path == "Qwen/Qwen2.5-0.5B-Instruct"
        assert config.run.name == request.name == "evaluate_wordle_Qwen-Qwen2.5-0.5B-Instruct"

    @pytest.mark.parametrize(
        ("line", "stand_in"),
        [
            (f"train --config-path {WORDLE}", None),
            (f"train --config-path {BFCL}", "Qwen/Qwen2.5-3B-Instruct"),
        ],
    )
    def test_its_training_composes_and_fits_its_machine_by_the_ledger(self, line, stand_in):
        # xLAM was made from this Qwen, whose sizes are known without the hub.
        request = function(line)
        words = [*request.command[1:], *([f"base_model={stand_in}"] if stand_in else [])]
        config = compose_stage("train", words)
        assert config.run.name == request.name
        report = preflight(config, "train")
        assert report.ledger is not None and report.ledger.margin_gib > 1
        known = ("environment.name", "base_model")  # what is on the hub, which does not answer here
        assert [str(f) for f in report.errors if f.key not in known] == []


class TestNames:
    def test_the_file_is_current(self):
        assert environments.FILE.read_text(encoding="utf-8") == as_text(), (
            "run python -m drzero.launch.known_keys"
        )

    @pytest.mark.parametrize(
        ("typed", "name"),
        [
            ("demo", "demo"),
            ("own", "own"),
            ("vf_wordle", "wordle"),
            ("verifiers:textarena", "verifiers:textarena"),
            ("textarena", "verifiers:textarena"),
            ("verifiers:of-a-package", "verifiers:of-a-package"),
            ("vf-tool-test", "bfcl-single-turn"),
        ],
    )
    def test_a_name_is_taken_as_users_type_it(self, typed, name):
        assert check_environment(typed) == name

    def test_the_users_own_are_found_in_the_checkout(self, tmp_path, monkeypatch):
        (tmp_path / "number.py").write_text("")
        (tmp_path / "word_game").mkdir()
        (tmp_path / "word_game" / "__init__.py").write_text("")
        monkeypatch.setattr(environments, "OWN", tmp_path)
        assert (check_environment("number"), check_environment("vf-word-game")) == ("number", "word-game")

    @pytest.mark.parametrize(
        ("name", "problem", "package"),
        [
            ("gsm8k", "verifiers", "pip: [gsm8k]"),
            ("verifiers:acereason_math", "verifiers", "pip: [acereason_math]"),
            ("empty", "has no function load()", "pip: [empty]"),
        ],
    )
    def test_one_that_the_containers_packages_do_not_have_is_an_error_before_a_gpu_is_requested(
        self, tmp_path, monkeypatch, name, problem, package
    ):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "__init__.py").write_text("")
        monkeypatch.setattr(environments, "OWN", tmp_path)
        words = [f"paths.environments={tmp_path}", *action(f"train --env {name}").command[1:]]

        def found() -> Finding:
            config = compose_stage("train", words)
            (one,) = [one for one in preflight(config, "train").findings if problem in one.why]
            return one

        assert found().severity is Severity.WARNING  # here, which is another machine
        monkeypatch.setenv(SAME_PACKAGES, "1")
        assert found().severity is Severity.ERROR and package in found().fix

    def test_a_package_of_the_run_file_may_bring_one(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text("{env: theirs, image: {pip: [their-environments==1.0]}}")
        assert action(f"train --config-path {file}").env == "theirs"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (
                "train --env wordel",
                "--env wordel: no such environment (did you mean 'wordle'?). Corpora to search",
            ),
            ("train env=wordel", "did you mean 'wordle'?"),
            ("train", "train: --env is missing: name an environment"),
            ("train --env demo", "demo is a corpus, which --action challenger searches"),
            ("challenger --env wordle", "challenger searches a corpus (own or demo), and wordle is played"),
            ("preflight solver --env wordle", "solver searches a corpus"),
            ("train --env wordle --num-examples 3", "--num-examples is for evaluate, not train"),
            ("train --env wordle --config-path nowhere.yaml", "--config-path nowhere.yaml: no such file"),
            ("train --env wordle environment.max_turn=3", "did you mean 'environment.max_turns'?"),
        ],
    )
    def test_a_mistake_is_one_line_with_those_there_are(self, line, message):
        with pytest.raises(LaunchError) as refused:
            action(line)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_an_action_takes_it_as_a_flag_or_as_an_override(self):
        one, two = action("train --env vf-wordle --steps 3"), action("train env=vf-wordle --steps 3")
        assert one.command == two.command and one.name == "train_wordle"
        assert action("preflight train --env wordle").command[:2] == ("preflight", "train")


class TestWhatFollows:
    @pytest.mark.parametrize("file", ["", f" --config-path {GENERAL}"])
    def test_what_an_environment_needs_of_the_general_machine_is_not_asked_of_several_gpus(self, file):
        line = "train --env {} --gpu-type H100 --gpu-count 8" + file
        of_bfcl, of_wordle = (action(line.format(env)).compute for env in ("bfcl-single-turn", "wordle"))
        assert of_bfcl.changed(max_usd=of_wordle.max_usd) == of_wordle

    def test_a_run_file_wins_over_what_the_general_one_has_for_its_environment(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "{env: vf-bfcl-single-turn, compute: {memory: 131072, max_usd: 10}, "
            "overrides: [data.max_prompt_length=7168]}"
        )
        request = action(f"train --config-path {file}")
        assert (request.compute.memory, request.compute.max_usd) == (131072, 10)
        assert value(request, "data.max_prompt_length") == "7168"
        assert value(request, "actor_rollout_ref.model.lora_rank") == "32"  # what it leaves out

    def test_settings_of_an_environment_win_over_a_files_and_typed_ones_over_both(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "{env: wordle, overrides: [trainer.save_freq=5, data.max_prompt_length=64], "
            "overrides_by_env: {vf_wordle: [data.max_prompt_length=128], own: [data.max_prompt_length=9]}}"
        )
        request = action(f"train --config-path {file}")
        assert (value(request, "trainer.save_freq"), value(request, "data.max_prompt_length")) == ("5", "128")
        request = action(f"train --config-path {file} data.max_prompt_length=32")
        assert value(request, "data.max_prompt_length") == "32"

    def test_packages_of_an_environment_are_added_to_the_image(self):
        mine = ImageExtras(pip=("mine==1.0",))
        assert with_packages_of("wordle", mine) == with_packages_of(None, mine) == mine
        assert with_packages_of("agent", mine).pip == ("openai", *mine.pip)
        of_library = with_packages_of("verifiers:gsm8k", mine)
        assert of_library.pip == (f"verifiers[ta]=={pinned('verifiers')}", "mine==1.0")
        assert with_packages_of("bfcl-single-turn", mine).alone == (f"bfcl-eval=={pinned('bfcl-eval')}",)

    @pytest.fixture
    def script(self, tmp_path, monkeypatch):
        monkeypatch.setattr("drzero.launch.request.ROOT", tmp_path)
        path = tmp_path / "examples" / "grpo" / "train_mine.py"
        path.parent.mkdir(parents=True)
        path.write_text("")
        return "examples/grpo/train_mine.py"

    def test_a_script_of_the_run_file_trains_in_its_environment_and_no_other(self, tmp_path, script):
        file = tmp_path / "run.yaml"
        file.write_text(f"{{env: wordle, scripts_by_env: {{vf-wordle: {script}}}}}")
        request = action(f"train --config-path {file} --steps 3")
        assert request.script == script
        shown = yaml.safe_load(request.as_yaml())["command"]
        assert shown.startswith(f"python {script} compute=") and "steps=3" in shown
        assert action(f"train --config-path {file} --env textarena").script is None
        assert action(f"evaluate --config-path {file}").script is None

    @pytest.mark.slow("the command line in a process of its own; the first tier has what the launch asks for")
    def test_the_script_of_the_docs_trains_with_what_the_launch_asks_for_and_ends_as_it_does(self, tmp_path):
        page = (ROOT / "docs" / "modal.md").read_text(encoding="utf-8")
        (listing,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        (tmp_path / "train_mine.py").write_text(listing, encoding="utf-8")
        command = [sys.executable, str(tmp_path / "train_mine.py"), "hardware=cpu", "env=nonesuch"]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert ended.returncode == 2 and "there is no environment 'nonesuch'" in ended.stderr

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("examples/grpo/none.py", "no such Python file in the checkout"),
            ("mine.py", "put it under examples/grpo/"),
        ],
    )
    def test_a_script_that_no_container_would_have_is_refused(self, tmp_path, script, path, message):
        (tmp_path / "mine.py").write_text("")
        file = tmp_path / "run.yaml"
        file.write_text(f"{{env: wordle, scripts_by_env: {{wordle: {path}}}}}")
        with pytest.raises(LaunchError, match=message):
            action(f"train --config-path {file}")
