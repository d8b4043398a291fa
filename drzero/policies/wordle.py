"""The Wordle policy: SmolLM2-135M, warm-started because it would write no guess.

    python -m drzero.policies.wordle            # six minutes on two idle cores; rerun to resume

The result is `outputs/corpus/models/wordle-policy`, or model=wordle-policy.
"""

from pathlib import Path
from typing import Any

from drzero.ops.console import say
from drzero.ops.files import publish, staging_folder
from drzero.policies.warm_start import fit, options
from drzero.stages.demo_models import load_base_model, load_base_tokenizer
from environments.wordle.demonstrations import demonstrations
from verl_ext.method.demonstration import encode

NAME = "wordle-policy"


def warm_start(target: Path, work: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train and merge the policy into `target`, unless the same policy is already there."""
    made_from = f"games {seed}, {steps} steps of {batch_size} at {lr:g}"
    marker = target / "made_from"
    if marker.is_file() and marker.read_text() == made_from:
        say("models", f"{target} exists already ({made_from})")
        return
    tokenizer = load_base_tokenizer()
    games = demonstrations(seed, steps * batch_size)
    examples = [encode(tokenizer, messages, tools=None) for messages in games]
    last, losses = fit(examples, tokenizer, work, steps, batch_size, lr, seed)
    say("models", f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    with staging_folder(target) as folder:
        _merged(last).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / marker.name).write_text(made_from)
        publish(folder, target)
    say("models", f"{target}: {made_from}")


def _merged(checkpoint: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base_model(), str(checkpoint)).merge_and_unload()


def main() -> None:
    """Train the Wordle policy."""
    places = {"target": Path("outputs/corpus/models") / NAME, "work": Path("outputs/warm_start_wordle")}
    warm_start(**options(main.__doc__, **places, steps=60, batch_size=8))


if __name__ == "__main__":
    main()
