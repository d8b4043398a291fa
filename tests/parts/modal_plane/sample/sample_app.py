"""The app for the control plane's tests: each function does one thing a launcher does."""

import json
import os
import subprocess
import time
from pathlib import Path

import modal

app = modal.App("plane-sample")
corpus = modal.Volume.from_name("sample-corpus", create_if_missing=True)
checkpoints = modal.Volume.from_name("sample-checkpoints", create_if_missing=True, version=2)
image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install("numpy==2.2.0")
    .env({"GREETING": "hello there", "PYTHONPATH": "/root/added", "HF_HOME": "/checkpoints/hub"})
    .add_local_dir(Path(__file__).parent / "extra", "/root/added")
)


@app.function(
    image=image,
    gpu="h100:8",
    cpu=(2, 4),
    memory=1024,
    timeout=3600,
    region=["us-east", "eu-west"],
    volumes={"/corpus": corpus.with_mount_options(read_only=True), "/checkpoints": checkpoints},
    secrets=[modal.Secret.from_name("wandb-secret"), modal.Secret.from_dotenv()],
    env={"MODE": "test"},
)
def facts(question: str) -> dict:
    """A container's files and environment."""
    import greeting

    print("looking", flush=True)
    Path(os.environ["DRZERO_MOUNT_CHECKPOINTS"], "seen").write_text(question)
    checkpoints.commit()
    corpus.reload()
    keys = ("GREETING", "MODE", "WANDB_API_KEY", "FROM_DOTENV")
    return {
        "mounted": greeting.TEXT,
        "environment": {key: os.environ.get(key) for key in keys},
        "laptop": os.environ.get("ONLY_ON_THE_LAPTOP"),
    }


@app.function(image=image)
def echo(content: bytes) -> bytes:
    return content


@app.function(image=image, volumes={"/checkpoints": checkpoints})
def writes() -> list:
    """Commits one more file in each attempt, and leaves another half-written, up to the third."""
    folder = Path(os.environ["DRZERO_MOUNT_CHECKPOINTS"], "steps")
    folder.mkdir(exist_ok=True)
    checkpoints.reload()
    found = sorted(os.listdir(folder))
    if len(found) < 2:
        (folder / f"step{len(found)}").write_text("whole")
        checkpoints.commit()
        # In a session of its own, with a file of the volume open.
        subprocess.Popen(["sleep", "600"], stdin=(folder.parent / "seen").open("a"), start_new_session=True)
        (folder / "uncommitted").write_text("ha")
        print(f"attempt after {len(found)}", flush=True)
        time.sleep(60)
    return found


@app.function(image=image, volumes={"/checkpoints": checkpoints})
def holds() -> dict:
    """Commits with a file open, then without. Returns the process, the files at its start, and the error."""
    folder = Path(os.environ["DRZERO_MOUNT_CHECKPOINTS"])
    found = sorted(os.listdir(folder))
    with (folder / f"held{len(found)}").open("w") as file:
        file.write("x")
        file.flush()
        try:
            checkpoints.commit()
            refused = ""
        except RuntimeError as error:
            refused = str(error)
    checkpoints.commit()
    return {"process": os.getpid(), "found": found, "refused": refused}


@app.function(image=image, cpu=0.25, nonpreemptible=True)
def fixed() -> None:
    pass


@app.local_entrypoint()
def main(*arguments: str) -> None:
    """Runs the scenarios that the first argument names, with the other arguments."""
    for scenario in arguments[0].split(","):
        globals()[f"run_{scenario}"](*arguments[1:])


def run_facts(*overrides: str) -> None:
    print("facts", json.dumps(facts.remote(" ".join(overrides))))


def run_holds() -> None:
    spawned = []
    for _ in range(2):
        spawned.append(holds.spawn())
        print("held", json.dumps(spawned[-1].get()))
    print("asked", spawned[0].object_id, flush=True)
    while not Path("go").exists():
        time.sleep(0.05)
    try:
        spawned[0].get(timeout=0)
    except modal.exception.OutputExpiredError:
        print("expired")


def run_beyond() -> None:
    for options in ({"cpu": 400}, {"memory": 10**6}, {"region": "moon"}, {"retries": 11}, {"timeout": 90000}):
        try:
            echo.with_options(**options).remote(b"")
        except modal.exception.InvalidError as error:
            print("refused", error)
    try:
        fixed.with_options(gpu="T4").remote()
    except modal.exception.InvalidError as error:
        print("refused", error)
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        print("bare", error)


def run_writes() -> None:
    print("written", writes.remote())
