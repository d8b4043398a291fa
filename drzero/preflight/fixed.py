"""veRL's keys that a training stage has set for good: it relies on them, or its trainer reads no others."""

import os
from collections.abc import Iterator

from omegaconf import OmegaConf

from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, warning

OURS = "drzero_"
"""Our trainers' names begin so (`trainer.v1.trainer_mode`)."""
ADVANTAGES = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
}
"""What veRL's own computation of advantages would read. Ours is HRPO's or GRPO's."""
_CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents"


def check_fixed_keys(ctx: CheckContext) -> Iterator[Finding]:
    """Checkpoints must be saved, whole and where they are read; a run trains; nothing is set in vain."""
    yield from _checkpoints(ctx)
    config, trainer = ctx.config, ctx.config.trainer
    if trainer.val_only:
        yield error("trainer.val_only", "this stage trains", "score a model with `drzero evaluate`")
    if config.critic.enable or (config.critic.enable is None and config.algorithm.adv_estimator == "gae"):
        why = "it builds a critic, which neither HRPO nor GRPO has"
        yield error("critic.enable", why, "leave it and algorithm.adv_estimator out")
    elif trainer.v1.trainer_mode.startswith(OURS):
        for key, wanted in ADVANTAGES.items():
            if (value := OmegaConf.select(config, key)) != wanted:
                why = f"{value} would change nothing: this trainer's advantages are {config.method.upper()}'s"
                yield error(key, why, f"leave it at {wanted}")


def _checkpoints(ctx: CheckContext) -> Iterator[Finding]:
    config, trainer = ctx.config, ctx.config.trainer
    if trainer.save_freq <= 0:
        why = "no checkpoint is saved, so a kill loses all, and the run leaves no model"
        severity, told = (error, f"{why} for the next stages") if ctx.ahead else (warning, why)
        fix = "set trainer.save_freq to the steps between two checkpoints (the last step is saved too)"
        yield severity("trainer.save_freq", told, fix)
    if os.path.abspath(trainer.default_local_dir) != os.path.abspath(config.run.dir):
        why = f"the stage reads its checkpoints in run.dir={config.run.dir}"
        yield error("trainer.default_local_dir", why, "set run.name= or paths.checkpoints= instead")
    missing = {"model", "optimizer", "extra"} - set(OmegaConf.select(config, _CONTENTS))
    if "model" in missing:
        yield error(_CONTENTS, "no checkpoint could be exported or resumed", "add model")
    elif missing:
        why = f"a resumed run would begin with new states of {' and '.join(sorted(missing))}"
        yield warning(_CONTENTS, why, f"add {', '.join(sorted(missing))}")
