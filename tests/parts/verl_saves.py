"""The files of a checkpoint as veRL writes them."""

import json
import zipfile
from pathlib import Path

from verl_ext.checkpoints import (
    TRACKER,
    step_folder,
)

RANKS = 2


# The files of one save in the order in which veRL writes them.
FILES = [
    *(f"actor/{kind}_world_size_2_rank_{rank}.pt" for rank in range(RANKS) for kind in ("model", "optim")),
    "actor/huggingface/config.json",
    "actor/fsdp_config.json",
    "data.pt",
]


def save(run: Path, step: int, files: int = len(FILES), tracker: str | None = None) -> None:
    """A save that was killed after `files` files; `tracker` is what it then wrote as the recorded number."""
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
