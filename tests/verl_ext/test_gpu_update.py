"""The actor's update as on 8×H100, with numbers: packed rows in bfloat16 by flash-attention.

flash-attention's functions are stand-ins in plain PyTorch (`rehearsal/flash_attn_stand_in`), with the
kernels' refusals. veRL's and Transformers' code around them is real.
"""

import os
from pathlib import Path

import pytest
from actor_steps import actor_config, make_rows, make_steps
from omegaconf import OmegaConf
from tiny_model import save_tiny_model

from drzero.recipe.compose import compose_plain, resolve

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow("two more updates by veRL's worker; `test_policy_loss.py` makes one")
START = """
import runpy, sys
# Transformers uses flash-attention if there is a GPU.
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def moved(folder, config):
    """How far each weight moved in one update of the whole batch."""
    folder.mkdir()
    actor = config["actor"]
    by_tokens = {"tokens": actor["ppo_max_token_len_per_gpu"]} if actor["use_dynamic_bsz"] else {}
    micro_batch = actor["ppo_micro_batch_size_per_gpu"]
    case = {"update": {"actor": {}, "micro_batch": micro_batch, "rows": make_rows(), **by_tokens}}
    path = os.pathsep.join(map(str, (HERE.parent, HERE / "rehearsal" / "flash_attn_stand_in")))
    update = make_steps(folder, config, case, start=("-c", START), path=path)["update"]
    return dict(update["moved"])


def gpu_config(model, plain):
    """The same update on 8×H100, also by plain gradient steps."""
    overrides = ["hardware=8xh100", f"base_model={model}"]
    config = resolve(compose_plain("challenger", overrides)).actor_rollout_ref
    config.actor.optim = plain["actor"]["optim"]
    made = OmegaConf.to_container(config)
    return {str(key): value for key, value in made.items()}


def test_the_packed_bfloat16_update_moves_weights_alike(tmp_path, smollm2_tokenizer):
    model = save_tiny_model(tmp_path / "model", tokenizer=smollm2_tokenizer)
    plain = actor_config(model)
    config = gpu_config(model, plain)
    assert config["model"]["use_remove_padding"] and config["model"]["enable_gradient_checkpointing"]
    assert config["model"]["use_fused_kernels"] and config["actor"]["use_dynamic_bsz"]
    assert "attn_implementation" not in config["model"]["override_config"]  # veRL's default: flash-attention
    expected, found = moved(tmp_path / "plain", plain), moved(tmp_path / "gpu", config)
    for name, step in expected.items():
        # bfloat16 has eight bits: a few thousandths in each of about ten operations.
        assert (found[name] - step).norm() < 0.05 * step.norm(), name
