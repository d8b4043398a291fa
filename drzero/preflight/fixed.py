"""veRL's keys that must keep their values: a training stage relies on them, or nothing reads them."""

import os
from collections.abc import Iterator

from omegaconf import OmegaConf

from drzero.ops.text import did_you_mean
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, warning

OURS = "drzero_"
"""Our trainers' names begin so (`trainer.v1.trainer_mode`)."""
ADVANTAGES = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.use_pf_ppo": False,
}
"""What veRL's own computation of advantages would read."""
REWARD_MANAGERS = ("naive", "dapo", "gdpo", "rate_limited", "remote")
"""The names that veRL 0.9.1 registers."""
_CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents"


def check_fixed_keys(ctx: CheckContext) -> Iterator[Finding]:
    """A run must train, and save whole checkpoints where its stage reads them. No key is set in vain."""
    yield from _checkpoints(ctx)
    config, trainer = ctx.config, ctx.config.trainer
    if trainer.val_only:
        yield error("trainer.val_only", "this stage trains", "score a model with `drzero evaluate`")
    if trainer.critic_warmup > 0:
        yield error("trainer.critic_warmup", "without a critic, these steps train nothing", "leave it out")
    manager = config.reward.reward_manager
    if manager.source == "register" and manager.name not in REWARD_MANAGERS:
        why = f"veRL has no reward manager of this name{did_you_mean(str(manager.name), REWARD_MANAGERS)}"
        yield error("reward.reward_manager.name", why, f"choose one of {', '.join(REWARD_MANAGERS)}")
    no_critic = "neither HRPO nor GRPO has a critic"
    if config.critic.enable:
        yield error("critic.enable", no_critic, "leave it out")
    if trainer.v1.trainer_mode.startswith(OURS):
        for key, wanted in ADVANTAGES.items():
            if OmegaConf.select(config, key) != wanted:
                why = "our trainer computes the advantages itself, and does not read this key"
                yield error(key, why, f"leave it at {wanted}")
    elif config.critic.enable is None and config.algorithm.adv_estimator == "gae":
        yield error(
            "algorithm.adv_estimator", f"veRL builds a critic for it, and {no_critic}", "leave it out"
        )


def _checkpoints(ctx: CheckContext) -> Iterator[Finding]:
    config, trainer = ctx.config, ctx.config.trainer
    if trainer.save_freq <= 0:
        why = "no checkpoint is saved, so a kill loses all, and the run leaves no model"
        severity, told = (error, f"{why} for the next stages") if ctx.ahead else (warning, why)
        fix = "set trainer.save_freq to the steps between two checkpoints (the last step is saved too)"
        yield severity("trainer.save_freq", told, fix)
    if os.path.abspath(str(trainer.default_local_dir)) != os.path.abspath(config.run.dir):
        why = f"the stage reads its checkpoints in run.dir={config.run.dir}"
        yield error("trainer.default_local_dir", why, "set run.name= or paths.checkpoints= instead")
    saved = OmegaConf.select(config, _CONTENTS)  # null is all of them
    missing = set() if saved is None else {"model", "optimizer", "extra"} - set(saved)
    if "model" in missing:
        yield error(_CONTENTS, "no checkpoint could be exported or resumed", "add model")
    elif missing:
        why = f"a resumed run would begin with new states of {' and '.join(sorted(missing))}"
        yield warning(_CONTENTS, why, f"add {', '.join(sorted(missing))}")
