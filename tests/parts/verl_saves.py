"""The files of a checkpoint as veRL writes them."""

import json
import zipfile
from pathlib import Path

from verl_ext.checkpoints import TRACKER, step_folder

RANKS = 2


# In veRL's order of writing.
FILES = [
    *(f"actor/{kind}_world_size_2_rank_{rank}.pt" for rank in range(RANKS) for kind in ("model", "optim")),
    "actor/huggingface/config.json",
    "actor/fsdp_config.json",
    "data.pt",
]


def save(run: Path, step: int, files: int = len(FILES), tracker: str | None = None) -> None:
    """A save killed after `files` files. `tracker` is the recorded number, if it was written."""
    for name in FILES[:files]:
        path = step_folder(run, step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".pt":
            with zipfile.ZipFile(path, "w") as archive:  # as torch saves
                archive.writestr("data.pkl", f"step {step}")
        else:
            path.write_text(json.dumps({"world_size": RANKS}))
    if tracker is not None:
        (run / TRACKER).write_text(tracker)
