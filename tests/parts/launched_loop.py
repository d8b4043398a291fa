"""A whole real loop through the launcher: every stage in Modal's container, preempted in one of them.

It takes minutes, so the session's fixture runs it once. Tests of the launcher check the client's output and
the volume, and tests of the loop and its stages check the run folders.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modal_plane import ControlPlane
    from modal_plane.client import Done
    from modal_plane.state import Call
    from stage_run import Run

CORPUS, CHECKPOINTS = "dr-zero-corpus", "dr-zero-checkpoints"
CUT = "synthesize_iter1"
"""The stage in which the container is preempted, with some of its samples drawn."""


@dataclass
class LaunchedLoop:
    """A finished loop of one iteration, and its plane."""

    plane: ControlPlane
    checkout: Path
    uploads: list[Done]
    """Of the corpus, the model, and the model a second time."""
    done: Done
    """`modal run modal_train.py --action evolve …`."""
    call: Call
    """Its one call, of two attempts."""
    seen: set[str] = field(default_factory=set)
    """The command lines and titles of all processes during the run."""

    @property
    def committed(self) -> Path:
        return self.plane.volume(CHECKPOINTS).committed()

    @property
    def mounted(self) -> Path:
        """The folder containers see. Changes here are lost when the next one starts."""
        return self.plane.volume(CHECKPOINTS).folder

    @cached_property
    def arguments(self) -> list[str]:
        from chaos import small_loop

        corpus = self.plane.volume(CORPUS).folder
        return small_loop(corpus, corpus / "models" / "tiny", self.mounted)

    def run(self, name: str) -> Run:
        """One of its training runs, as `stage_run` describes them."""
        from stage_run import Run
        from watch import Watch

        return Run(self.done.code, self.done.stdout, self.done.stderr, self.mounted / name, Watch())


def launch_words() -> list[str]:
    """The words after `--action evolve`: a small loop without a GPU, with the model on the volume."""
    from chaos import small_loop

    own = ("hardware=", "model=", "base_model=", "paths.")
    small = [word for word in small_loop(Path(), Path(), Path()) if not word.startswith(own)]
    return ["--gpu-count", "0", "--model", "demo-policy", "base_model=${paths.corpus}/models/tiny", *small]


@contextmanager
def launched(folder: Path, corpus: Path, model: Path) -> Iterator[LaunchedLoop]:
    """Upload corpus, index and prompts, launch the loop on them, preempt its container, and let it finish."""
    from chaos import SAMPLES
    from modal_checkout import make_checkout, run_action, stage_plane, start_action
    from stage_run import RUN_LIMIT_S

    (folder / "checkout").mkdir()
    checkout = make_checkout(folder / "checkout", dotenv=True)
    with stage_plane(folder / "plane") as plane:
        with _command_lines() as seen:
            uploads = [
                run_action(plane, checkout, "upload", str(source), target).succeeded()
                for source, target in ((corpus, "/"), (model, "models/tiny"), (model, "models/tiny"))
            ]
            client = start_action(plane, checkout, "evolve", *launch_words())
            journal = plane.volume(CHECKPOINTS).folder / CUT / "samples.jsonl"

            def some_are_drawn() -> bool:
                drawn = journal.read_bytes().count(b"\n") if journal.is_file() else 0
                return client.has_ended or drawn > 4 * SAMPLES

            plane.wait_for(some_are_drawn, "samples", 2 * RUN_LIMIT_S)
            call = [call for call in plane.calls if call.function == "cpu_stage"][-1]
            plane.preempt(call)
            done = client.wait(2 * RUN_LIMIT_S)
        yield LaunchedLoop(plane, checkout, uploads, done, call, seen)


@contextmanager
def _command_lines() -> Iterator[set[str]]:
    """Collect the command lines of all processes while this lasts."""
    import psutil

    seen: set[str] = set()
    ended = threading.Event()

    def collect() -> None:
        while not ended.wait(1.0):
            seen.update(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join()
