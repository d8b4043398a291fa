"""`drzero preflight STAGE`: what it composes."""

import pytest

from drzero.cli import STAGES, _load, main
from drzero.loop.preflight import preflight_stage
from drzero.recipe.compose import compose_stage, resolve, write_resolved
from drzero.stages.models import completed


@pytest.mark.parametrize("chosen", [[], ["iteration=1"]])
def test_of_an_agent_it_checks_the_model_and_the_settings_that_would_answer(chosen, tmp_path, capsys):
    for iteration in (1, 2):
        (tmp_path / f"solver_iter{iteration}_hf").mkdir()
        run = [f"paths.checkpoints={tmp_path}", f"run.name=evaluate_iter{iteration}"]
        embedder = f"retrieval.embedder=/nowhere/embedder{iteration}"
        write_resolved(resolve(compose_stage("evaluate", [*run, embedder])))
    assert main(["preflight", "ask", f"paths.checkpoints={tmp_path}", *chosen]) == 2
    printed = capsys.readouterr().out
    expected, other = (1, 2) if chosen else (2, 1)
    assert f"solver_iter{expected}_hf" in printed and f"/nowhere/embedder{expected}" in printed
    assert f"solver_iter{other}_hf" not in printed and f"/nowhere/embedder{other}" not in printed


COMPLETED = [name for name, command in STAGES.items() if command.overrides and command.config != "challenger"]
WORDS = ["source=papers.jsonl", "hardware=cpu", "api=chat", "endpoint=http://127.0.0.1:9/v1", "model=gpt-any"]


@pytest.mark.parametrize("name", COMPLETED)
def test_a_stages_overrides_are_completed_as_its_command_does(name):
    complete = _load(STAGES[name].overrides)
    assert completed(name.replace("-", "_"), WORDS) == complete(WORDS) != WORDS


def test_a_missing_file_that_two_checks_read_is_reported_once(tmp_path):
    words = [f"paths.corpus={tmp_path}", f"paths.checkpoints={tmp_path}"]
    (report,) = preflight_stage("synthesize", words)
    assert [found.key for found in report.errors].count("data.train_files") == 1
