"""GRPO on function calls (BFCL), start to end: held-out categories, training, the same again, comparison.

    python examples/grpo/train_bfcl.py                  # one GPU
    python examples/grpo/train_bfcl.py steps=500        # overrides of the training come last
    python examples/grpo/train_bfcl.py --cpu            # two steps of a small model, to see all of it run

BFCL is a test set: training never sees its live categories, which both evaluations ask
(docs/environments.md). For calls of your own, put `+environment.options.file=calls.jsonl` into TASKS; for
conversations with tools, name bfcl-multi-turn in ENV. A model that calls no function at all learns nothing
here: begin with one that does.
"""

import subprocess
import sys
from collections.abc import Sequence

ENV = "bfcl-single-turn"
TASKS = [f"env={ENV}"]
FOLDER = "outputs/checkpoints"
BEFORE, RUN, AFTER = (f"{ENV}_{name}" for name in ("before", "grpo", "after"))

GPU = ["model=qwen2.5-3b", "hardware=single_gpu"]
TRAINING = [
    "steps=200",
    # Rows a step, and the episodes of each, which are compared with one another. Many, and sampled warm: else
    # most groups have all calls right or none, and teach nothing.
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=16", "rollout.temperature=1.2"),
    "actor_rollout_ref.actor.optim.lr=1e-6",
]
EVALUATION = ["num_examples=200"]

CPU = ["model=demo-policy", "hardware=cpu"]
REHEARSAL = [
    *("steps=2", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=4"),
    # This model's chat template shows of a tool little more than its name.
    *("data.max_prompt_length=512", "data.max_response_length=96"),
    # A model this small has few groups that teach anything: the update takes them as they come.
    "environment.filter_groups=false",
]


def main(arguments: Sequence[str]) -> int:
    """Run the steps in order; each resumes where it was cut off, and does nothing where it is done."""
    rehearsed = "--cpu" in arguments
    overrides = [one for one in arguments if one != "--cpu"]
    machine, training = (CPU, REHEARSAL) if rehearsed else (GPU, TRAINING)
    evaluation = [*TASKS, *machine, *(["num_examples=8"] if rehearsed else EVALUATION)]
    drzero = [sys.executable, "-m", "drzero.cli"]
    for command in (
        [*drzero, "evaluate", *evaluation, f"run.name={BEFORE}"],
        [*drzero, "train", *TASKS, *machine, *training, f"run.name={RUN}", *overrides],
        [*drzero, "evaluate", *evaluation, f"run.name={AFTER}", f"solver.model_path={FOLDER}/{RUN}_hf"],
        [*drzero, "compare", f"{FOLDER}/{BEFORE}", f"{FOLDER}/{AFTER}"],
    ):
        print("$", *command[1:], flush=True)
        if code := subprocess.run(command).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
