"""`drzero preflight STAGE`: what it composes."""

import pytest

from drzero.cli import main
from drzero.recipe.compose import compose_stage, resolve, write_resolved


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
