"""Every command line of the README, the docs and the guides: it is understood, and reaches what it names.

The first tier resolves each; the second composes and preflights each for real, and runs those of `modal` by
the unmodified client, whose preflight is the real one here as well.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import bench_agents
import pytest
from docs_environment import write_environment
from documented import ROOT, Line, lines
from modal_checkout import answer_as_usual, make_checkout
from modal_plane import ControlPlane

from drzero.cli import COMMANDS
from drzero.commands.preflight import run_preflight
from drzero.launch import environments
from drzero.launch.actions import find_action
from drzero.launch.arguments import parse_modal_run
from drzero.launch.image.own_files import carried
from drzero.launch.known_keys import check_keys
from drzero.launch.request import Request, resolve
from drzero.loop.preflight import preflight_stage
from drzero.loop.seeds import split_seeds
from drzero.preflight.run import STAGES
from drzero.recipe.settings.schema import in_full
from environments import registry

MODAL, DRZERO = lines("modal"), lines("drzero")
CARRIED = "../extra/"  # the folder of the client's files in a container
BY_CLIENT = ("upload", "download", "logs", "stacks")
ASKING = ("ask", "serve-agent")  # Their questions and options are no overrides.
COMPOSED = (*(stage.replace("_", "-") for stage in STAGES), "evolve")
REFUSED = "+actor_rollout_ref.actor.micro_batch_size_per_gpu=2"
"""The README shows how this one is refused."""


def request_of(line: Line) -> Request:
    words = parse_modal_run(line.words, "modal_train.py")
    assert words is not None
    return resolve(words)


def overrides_of(line: Line) -> list[str]:
    """The words of a line of `drzero` as its command gives them on: options of its own are overrides then."""
    words, own = list(line.words[2:]), getattr(COMMANDS.get(line.words[1]), "overrides", None)
    if line.words[1] in ASKING:
        return [word for word in words if "=" in word]
    return in_full(line.words[1].replace("-", "_"), resolve_name(own)(words) if own else words)


def on_volumes(words: list[str]) -> list[str]:
    """A container's words with volumes that are not here, and with the client's files where they are."""
    return [
        word.format(corpus="/volume", checkpoints="/volume")
        if "paths." in word
        else word.replace(CARRIED, "")
        for word in words
    ]


def test_the_pages_list_every_environment_and_model_that_comes_along():
    def listed(page: str) -> str:
        rows = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        return "\n".join(row.split("|")[1] for row in rows if row.startswith("| `"))

    tasks = [*registry.BUILT_IN, *registry.ALIASES, *(f"{name}:NAME" for name in registry.FAMILIES)]
    models = [file.stem for file in (ROOT / "config" / "model").glob("*.yaml")]
    for page, names in (("environments.md", tasks), ("models.md", models)):
        assert [name for name in names if f"`{name}`" not in listed(page)] == [], page


def test_the_command_lines_are_found():
    assert len(MODAL) > 20 and len(DRZERO) > 20
    assert {line.words[1] for line in DRZERO} <= {*COMMANDS, "--help"}


@pytest.mark.parametrize("line", MODAL, ids=lambda line: line.text)
def test_a_line_for_modal_is_a_launch(line, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert find_action(request_of(line).action)


@pytest.mark.parametrize(
    "line", [line for line in DRZERO if REFUSED not in line.words], ids=lambda line: line.text
)
def test_a_line_for_the_command_line_names_a_command_and_keys_that_exist(line, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "OWN", write_environment(tmp_path))
    check_keys([word for word in overrides_of(line) if "=" in word])


@pytest.mark.slow("a second per config of veRL's")
@pytest.mark.parametrize(
    "line", [line for line in DRZERO if line.words[1] in COMPOSED], ids=lambda line: line.text
)
def test_a_stage_as_the_docs_type_it_composes_and_is_preflighted(line, tmp_path):
    _, typed = split_seeds(overrides_of(line))
    words = [f"paths.corpus={tmp_path}", f"paths.checkpoints={tmp_path}"]
    words += [f"paths.environments={write_environment(tmp_path)}", *typed]
    reports = preflight_stage(line.words[1], words)
    refused = [report for report in reports if report.machine is None and report.findings]
    assert [report.findings[0].key for report in refused] == [REFUSED[1:-2]] * (REFUSED in line.words)


@pytest.mark.slow("two seconds per line, for the client's process")
class TestOnThePlane:
    @pytest.fixture(scope="class")
    def checkout(self, tmp_path_factory):
        folder = make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=False)
        (folder / ".env").write_text("OPENAI_API_KEY=of-a-model\n")
        (folder / "outputs" / "checkpoints" / "preview").mkdir(parents=True)
        preview = "outputs/checkpoints/preview/samples.jsonl"
        for name in ("papers.jsonl", "questions.jsonl", "prompts.parquet", preview):
            (folder / name).write_text('{"text": "A paper."}\n')
        shutil.copy(bench_agents.__file__, folder / "my_agent.py")
        return folder

    @pytest.fixture(scope="class")
    def plane(self, tmp_path_factory):
        def ask(module: str, words: list[str]) -> int:
            return run_preflight(on_volumes(words[1:])) if words[:1] == ["preflight"] else 0

        with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
            answer_as_usual(plane)
            plane.answer("ask", ask)
            yield plane

    @pytest.mark.parametrize("line", MODAL, ids=lambda line: line.text)
    def test_a_line_passes_preflight_and_reaches_its_function(self, plane, checkout, line, monkeypatch):
        monkeypatch.chdir(checkout)
        request = request_of(line)
        env = {"PYTHONPATH": str(checkout), "EXPERIMENTER": "", "EXPERIMENT_NAME": ""} | line.env
        done = plane.modal(*line.words[1:], cwd=checkout, env=env, seconds=300)
        calls = [call for call in plane.calls if call.app_id == plane.app.id]
        if request.action == "stacks":
            assert done.code == 1 and "no launch of" in done.stderr and not calls
            return
        done.succeeded()
        if request.action in BY_CLIENT:
            assert not calls
            return
        last: Any = calls[-1]
        if not find_action(request.action).is_job:
            assert last.function == "ask"
            return
        machine = request.compute
        assert last.function == ("gpu_stage" if machine.type else "cpu_stage")
        assert last.args[0].command == tuple(carried(request.command)[0])
        assert last.spec.gpu == ((machine.type, machine.count) if machine.type else None)
