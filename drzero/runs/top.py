"""`drzero top RUN_DIR`: a run's progress, parts and resources in the terminal, refreshed until it ends.

    drzero top outputs/checkpoints/challenger_iter1      # Ctrl-C leaves it; the run continues

Reads only what the run writes, so it may be started at any time, on any machine that has the folder. Of a run
that has ended, or without a terminal, it prints the present state once. Of a loop it shows the stage that was
begun last.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.live import Live
from rich.text import Text

from drzero.ops.console import has_live_terminal
from drzero.ops.notices import Notice, notice_of
from drzero.ops.process.lock import lock_is_held
from drzero.recipe.compose import RESOLVED
from drzero.runs.loop_folder import last_stage
from drzero.runs.run_folder import named_run
from drzero.runs.view.run_state import RunFacts, RunFiles
from drzero.runs.view.screen import screen

_EVERY_S = 1.0


def run_top(arguments: Sequence[str]) -> None:
    """Draw the run in a folder until it ends or Ctrl-C; raises NotARun for a folder without a run."""
    top = _Top(last_stage(named_run(arguments, "top")))
    console = Console(highlight=False, markup=False)
    top.poll()
    if has_live_terminal() and top.is_running():
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while top.is_running():
                live.update(top.picture(console.width, console.height), refresh=True)
                time.sleep(_EVERY_S)
                top.poll()
    console.print(top.picture(console.width, None), soft_wrap=True)


class _Top:
    """A run as it is now, and what has happened since its last start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = RunFiles(folder, _facts(folder))
        self._notices: list[Notice] = []

    def is_running(self) -> bool:
        """Whether a process works on the run."""
        return lock_is_held(self._folder / "lock")

    def poll(self) -> None:
        """Read what is new."""
        _, events = self._files.poll()
        state, began = self._files.state, self._files.state.began or 0.0
        if state.ended is None and not self.is_running():
            state.ended = state.last_sign
            state.components = dict.fromkeys(state.components, "gone")
        new = [notice for event in events if (notice := notice_of(event))]
        self._notices = [notice for notice in (*self._notices, *new) if notice.time >= began]

    def picture(self, width: int, height: int | None) -> Text:
        """The run, drawn for a terminal of that size."""
        return screen(self._files.state, self._notices, time.time(), width, height)


def _facts(folder: Path) -> RunFacts:
    """What the run's own config says; a run that has not come that far has a name."""
    resolved = folder / f"{RESOLVED}.yaml"
    if not resolved.is_file():
        return RunFacts(folder.name)
    config = OmegaConf.load(resolved)
    assert isinstance(config, DictConfig)
    return RunFacts.of(config)
