"""The actor's update as 8×H100 has it, with numbers: packed rows in bfloat16 by flash-attention.

veRL's own engine and Transformers' own way to flash-attention; its functions themselves are stand-ins in
plain PyTorch (`rehearsal/flash_attn_stand_in`), which refuse what the kernels refuse.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_steps import actor_config, make_rows, make_steps
from omegaconf import OmegaConf
from tiny_model import save_tiny_model

from drzero.recipe.compose import compose_plain, resolve

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow("two more updates by veRL's worker; `test_policy_loss.py` makes one")
START = """
import runpy, sys
# Transformers takes flash-attention where there is a GPU.
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def moved(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """How far each weight moved in one update of the whole batch."""
    folder.mkdir()
    micro_batch = config["actor"]["ppo_micro_batch_size_per_gpu"]
    case = {"update": {"actor": {}, "micro_batch": micro_batch, "rows": make_rows()}}
    path = os.pathsep.join(map(str, (HERE.parent, HERE / "rehearsal" / "flash_attn_stand_in")))
    update = make_steps(folder, config, case, start=("-c", START), path=path)["update"]
    return dict(update["moved"])


def gpu_config(model: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """The same update on 8×H100; by plain gradient steps as well."""
    config = resolve(
        compose_plain("challenger", ["hardware=8xh100", f"base_model={model}"])
    ).actor_rollout_ref
    config.actor.optim = plain["actor"]["optim"]
    made = OmegaConf.to_container(config)
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def test_the_packed_update_in_bfloat16_moves_the_weights_as_the_plain_one_does(
    tmp_path: Path, smollm2_tokenizer: Any
) -> None:
    model = save_tiny_model(tmp_path / "model", tokenizer=smollm2_tokenizer)
    plain = actor_config(model)
    config = gpu_config(model, plain)
    assert config["model"]["use_remove_padding"] and config["model"]["enable_gradient_checkpointing"]
    assert "attn_implementation" not in config["model"]["override_config"]  # veRL's default: flash-attention
    expected, found = moved(tmp_path / "plain", plain), moved(tmp_path / "gpu", config)
    for name, step in expected.items():
        # bfloat16 has eight bits: a few thousandths in each of some ten operations.
        assert (found[name] - step).norm() < 0.05 * step.norm(), name
