"""`--action stacks RUN`: where the processes of a running launch stand, asked of its container.

A container cannot reload a volume while its run has files open there, so question and answer go through the
Dict of the claims. The page this writes is on the volume within a minute.
"""

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import modal

from drzero.launch.arguments import Words
from drzero.launch.claims import Claims
from drzero.launch.errors import LaunchError
from drzero.launch.request import run_name
from drzero.launch.volumes import place

POLL_S = 5.0  # seconds between a container's looks for a question
ANSWER_S = 180.0  # seconds to wait for an answer, and the age at which a question is no longer answered
_LOOK_S = 120.0


def run_stacks(words: Words, table: "modal.Dict", claims: Claims) -> int:
    """Print the answer. Returns its exit code. Raises LaunchError without a running run or an answer."""
    run = run_name(words)
    claim = claims.running(run)
    if claim is None:
        raise LaunchError(
            f"stacks: no launch of {run!r} is running: --action diagnose {run} has how it ended, --action "
            "status lists all launches"
        )
    number = uuid.uuid4().hex
    table.put(_question(claim.call), {"id": number, "run": run, "at": time.time()})
    deadline = time.monotonic() + ANSWER_S
    while (answer := table.get(_answer(number))) is None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"stacks: call {claim.call} of {run} has not answered within {ANSWER_S:.0f} s: it may still "
                f"wait for its machine; live: modal app logs {claim.app or 'APP_ID'}"
            )
        time.sleep(0.5)
    print(answer["text"], end="")
    if answer["code"] == 0:
        print(f"[launch] within a minute --action download {run}/logs has the page")
    return int(answer["code"])


@contextmanager
def answering(table: "modal.Dict", call: str, poll_s: float = POLL_S) -> Iterator[None]:
    """Answer questions to this call while the block runs, in a thread so that the run does not wait."""
    ended = threading.Event()
    thread = threading.Thread(target=_answer_until, args=(ended, table, call, poll_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _answer_until(ended: threading.Event, table: "modal.Dict", call: str, poll_s: float) -> None:
    answered, failure = "", ""
    while not ended.wait(poll_s):
        try:
            question = table.get(_question(call))
            if question and question["id"] != answered and time.time() - question["at"] < ANSWER_S:
                answered = question["id"]
                table.put(_answer(answered), _look(question["run"]))
        # Modal may raise anything, and a run must not end because nobody can ask about it.
        except Exception as error:
            if failure != repr(error) and not ended.is_set():
                failure = repr(error)
                print(f"[launch] --action stacks cannot be answered for now: {failure}", flush=True)


def _look(run: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "drzero.cli", "stacks", str(place("checkpoints") / run)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, errors="replace", timeout=_LOOK_S, check=False, **pipes)
    except subprocess.TimeoutExpired:
        return {"code": 1, "text": f"drzero stacks: took longer than {_LOOK_S:.0f} s there\n"}
    return {"code": done.returncode, "text": done.stdout}


# Without a slash, which only the keys of claims have.
def _question(call: str) -> str:
    return f"stacks asked of {call}"


def _answer(question: str) -> str:
    return f"stacks answer {question}"
