"""A checkout to launch from, with a `.env` and other files that must not be sent, and the commands for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from modal_plane import ControlPlane
from modal_plane.client import Client, Done

from drzero.launch.image.image import SOURCE

ROOT = Path(__file__).parents[2]
PLANTED = {
    "WANDB_API_KEY": "planted-wandb-7f3a",
    "HF_TOKEN": "planted-hf-91bc",
    "RETRIEVAL_TOKEN": "planted-retrieval-5d2e",
    "AGENT_TOKEN": "planted-agent-08b1",
    "OPENAI_API_KEY": "planted-openai-c840",
}
"""Secret values that may reach a container's environment, and nothing else."""
SHARED = {"EXPERIMENTER": "", "EXPERIMENT_NAME": ""}
"""Environment of a client that uses the shared volumes."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "RAY_worker_niceness": "0"}
"""Environment of a container here: no hub, and few cores, which other tests share."""


FINISHED = {"state": "finished", "message": "done", "usd": 1.5, "next": None}
"""What a stage returns that has finished."""


def answer_as_usual(plane: ControlPlane) -> None:
    """Let every check pass and every stage finish, without a container."""
    plane.answer("ask", lambda module, words: 0)
    plane.answer("check_gpu_image", lambda: 0)
    plane.answer("cpu_stage", lambda request: FINISHED)
    plane.answer("gpu_stage", lambda request: FINISHED)


def stage_plane(folder: Path) -> ControlPlane:
    """A plane whose containers run real stages. A preempted one has time to end its stage."""
    return ControlPlane(folder, container_env=OFFLINE, grace=40)


def make_checkout(folder: Path, *, dotenv: bool) -> Path:
    """Copy the parts a launch needs. `dotenv` adds a `.env` and a key file of planted secrets."""
    for name in (*SOURCE, "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    if dotenv:
        (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in PLANTED.items()))
        (folder / "config" / ".env").write_text(f"KEY={PLANTED['HF_TOKEN']}\n")
        (folder / "drzero" / "launch" / "id_rsa").write_text(
            f"-----BEGIN OPENSSH PRIVATE KEY-----{PLANTED['HF_TOKEN']}"
        )
    return folder


def start_action(plane: ControlPlane, checkout: Path, *words: str, detach: bool = False) -> Client:
    """Start `modal run [--detach] modal_train.py --action …` in a checkout."""
    flags = ["--detach"] if detach else []
    return plane.start("run", *flags, "modal_train.py", "--action", *words, cwd=checkout, env=SHARED)


def run_action(plane: ControlPlane, checkout: Path, *words: str, seconds: float = 300) -> Done:
    return start_action(plane, checkout, *words).wait(seconds)


def start_function(plane: ControlPlane, checkout: Path, function: str, *words: str) -> Client:
    return plane.start("run", f"modal_train.py::{function}", *words, cwd=checkout, env=SHARED)


def run_function(plane: ControlPlane, checkout: Path, function: str, *words: str) -> Done:
    return start_function(plane, checkout, function, *words).wait(300)
