"""The layouts and commands of docs/machines.md, judged by the memory ledger."""

from pathlib import Path

import pytest

from drzero.preflight.memory_ledger import lora_rank
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage

PAGE = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
MODELS = ["qwen2.5-3b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]
OF_MEMORY = ("GiB", "sequence")


def errors_about_memory(stage, *overrides):
    config = compose_stage(stage, ["compute=8xh100", *overrides])
    return [str(one) for one in preflight(config, stage).errors if any(word in one.why for word in OF_MEMORY)]


@pytest.mark.parametrize("stage", ["challenger", "solver", "evaluate"])
def test_four_copies_over_two_gpus_serve_the_models_that_the_page_names(stage):
    rows = [line.split("|") for line in PAGE.splitlines() if "| `qwen" in line]
    row = next(row for row in rows if stage in row[1].partition(":")[0])
    served = [
        model for model in MODELS if not errors_about_memory(stage, f"model={model}", "solver.tp_size=2")
    ]
    assert row[2].strip() == ", ".join(f"`{model}`" for model in served)


@pytest.mark.parametrize("stage", ["challenger", "solver"])
def test_the_largest_model_fits_with_its_option_alone_and_trains_an_adapter(stage):
    assert f"drzero challenger compute=8xh100 model={MODELS[-1]} " in PAGE
    assert errors_about_memory(stage, f"model={MODELS[-1]}") == []
    config = compose_stage("challenger", ["compute=8xh100", f"model={MODELS[-1]}"])
    assert (lora_rank(config), config.solver.tp_size, config.solver.dp_size) == (32, 8, 1)
