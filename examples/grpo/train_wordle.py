"""GRPO on Wordle, start to end: warm start, held-out words, training, held-out words again, comparison.

    make wordle                                          # on a CPU, within 40 minutes on two idle cores
    python examples/grpo/train_wordle.py steps=40        # overrides of the training come last

To train in an environment of your own, copy this page, name it in ENV, and choose a model that can earn some
reward in it; where one can, as a larger model will, no warm start is needed. docs/environments.md says how to
write one.
"""

import subprocess
import sys
from collections.abc import Sequence

ENV = "wordle"
MODEL = "wordle-policy"
FOLDER = "outputs/checkpoints"
BEFORE, RUN, AFTER = (f"{ENV}_{name}" for name in ("before", "grpo", "after"))

EVALUATION = [
    *(f"env={ENV}", f"model={MODEL}", "hardware=cpu", "num_examples=150"),
    # As in training: the likeliest guess of a small model is often the one it has made before.
    "solver.temperature=1.0",
]
TRAINING = [
    *(f"env={ENV}", f"model={MODEL}", "hardware=cpu", f"run.name={RUN}"),
    "steps=20",
    # Rows a step, and the episodes of each, which are compared with one another.
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4"),
    "actor_rollout_ref.actor.optim.lr=3e-5",
    # The update is most of a step, and takes half the time in bfloat16 where the processor multiplies it.
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=${fast_cpu_dtype:reference}",
    "trainer.save_freq=10",
]


def main(overrides: Sequence[str]) -> int:
    """Run the steps in order; each resumes where it was cut off, and does nothing where it is done."""
    drzero = [sys.executable, "-m", "drzero.cli"]
    for command in (
        [sys.executable, "-m", "drzero.policies.wordle"],
        [*drzero, "evaluate", *EVALUATION, f"run.name={BEFORE}"],
        [*drzero, "train", *TRAINING, *overrides],
        [*drzero, "evaluate", *EVALUATION, f"run.name={AFTER}", f"solver.model_path={FOLDER}/{RUN}_hf"],
        [*drzero, "compare", f"{FOLDER}/{BEFORE}", f"{FOLDER}/{AFTER}"],
    ):
        print("$", *command[1:], flush=True)
        if code := subprocess.run(command).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
