"""What the launcher does at the user's machine without a container: upload, download, logs.

modal run modal_train.py --action upload papers.jsonl
modal run modal_train.py --action download challenger_iter1/dumps
modal run modal_train.py --action logs --stage solver --iteration 2 --follow
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import modal

from launch.arguments import Words
from launch.at_work import GOES_ON, other_at_work
from launch.errors import LaunchError
from launch.request import run_name
from launch.spend import Call
from launch.transfer import download, upload
from launch.volumes import LAUNCHES

_FOLLOW_S = 10.0
"""Between two looks at a log that is followed; the stage's side commits once a minute at least."""


def run_upload(words: Words, volume: modal.Volume) -> None:
    """`--action upload LOCAL [REMOTE]`, to the corpus volume."""
    if not 1 <= len(words.places) <= 2:
        raise LaunchError("--action upload LOCAL [REMOTE]: say what to upload, and where to")
    source = Path(words.places[0]).expanduser()
    target = words.places[1] if len(words.places) > 1 else usual_place(source)
    sent, there = upload(volume, source, target)
    print(f"{source} is at /corpus/{target.strip('/')}: {sent} files sent, {there} there already")


def usual_place(source: Path) -> str:
    """Where things of this kind lie on the corpus volume: an index, a model, or anything else."""
    if (source / "chroma.sqlite3").is_file():
        return "/chromadb"
    if (source / "config.json").is_file():
        return f"/models/{source.resolve().name}"
    return f"/{source.resolve().name}"


def run_download(words: Words, volume: modal.Volume) -> None:
    """`--action download REMOTE [LOCAL]`, from the checkpoints volume."""
    if not 1 <= len(words.places) <= 2:
        raise LaunchError(
            "--action download REMOTE [LOCAL]: say what, for example challenger_iter1/dumps; "
            "--action status lists the runs"
        )
    source = words.places[0].strip("/")
    target = Path(words.places[1] if len(words.places) > 1 else f"outputs/modal/{source}").expanduser()
    got, there = download(volume, source, target)
    print(f"{source} is at {target}: {got} files fetched, {there} there already")


def run_logs(words: Words, volume: modal.Volume) -> None:
    """`--action logs [RUN] [--stage S --iteration I] [--follow]`: a run's console, as last committed."""
    name = run_name(words)
    shown = 0
    while True:
        state = _read(volume, f"{LAUNCHES}/{name}/state.json")
        if state is None:
            raise LaunchError(f"logs: no launch of {name!r} is on the volume; --action status lists them")
        text = _read(volume, f"{LAUNCHES}/{name}/console.log") or b""
        sys.stdout.write(text[shown:].decode("utf-8", errors="replace"))
        sys.stdout.flush()
        shown = len(text)
        known = json.loads(state)
        goes_on = known["outcome"] is None or known["outcome"]["state"] == GOES_ON
        if not goes_on or not words.follow:
            _tell_state(known)
            return
        time.sleep(_FOLLOW_S)


def told_at_work(volume: modal.Volume, run: str) -> str | None:
    """What to say when a launch of the run is at work already, by what the volume has; else None."""
    state = _read(volume, f"{LAUNCHES}/{run}/state.json")
    calls = _read(volume, f"{LAUNCHES}/{run}/spend.json")
    if state is None or calls is None:
        return None
    return other_at_work(json.loads(state), [Call(**call) for call in json.loads(calls)], "", time.time())


def _tell_state(state: dict[str, object]) -> None:
    if state["outcome"] is None:
        print(f"[launch] not ended when last heard of; live: modal app logs {state['app'] or 'APP_ID'}")


def _read(volume: modal.Volume, path: str) -> bytes | None:
    try:
        return b"".join(volume.read_file(path))
    except (modal.exception.NotFoundError, FileNotFoundError):
        return None
