"""`drzero top RUN_DIR`: a run's progress, parts and resources in the terminal, refreshed until it ends.

    drzero top outputs/checkpoints/challenger_iter1      # Ctrl-C leaves it, and the run continues

It reads only the run's files, so you may start it at any time, on any machine that has the folder. It prints
the state once if the run has ended or stdout is no terminal. Of a loop it shows the stage begun last.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from omegaconf import OmegaConf
from rich.console import Console
from rich.live import Live
from rich.text import Text

from drzero.ops.console import has_live_terminal
from drzero.ops.notices import Notice, notice_of
from drzero.ops.process.lock import lock_is_held
from drzero.runs.loop_folder import last_stage
from drzero.runs.run_folder import RunFolder, named_run
from drzero.runs.view.run_state import RunFacts, RunFiles
from drzero.runs.view.screen import screen

_EVERY_S = 1.0


def run_top(arguments: Sequence[str]) -> None:
    """Draw the run in a folder until it ends or Ctrl-C. Raises NotARun for a folder without a run."""
    top = _Top(RunFolder(last_stage(named_run(arguments, "top"))))
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
    def __init__(self, run: RunFolder) -> None:
        self._folder = run.folder
        facts = RunFacts.of(OmegaConf.create(run.config)) if run.config else RunFacts(run.name)
        self._files = RunFiles(run.folder, facts)
        self._notices: list[Notice] = []

    def is_running(self) -> bool:
        return lock_is_held(self._folder / "lock")

    def poll(self) -> None:
        _, events = self._files.poll()
        state, began = self._files.state, self._files.state.began or 0.0
        if state.ended is None and not self.is_running():
            state.ended = state.last_sign
            state.components = dict.fromkeys(state.components, "gone")
        new = [notice for event in events if (notice := notice_of(event))]
        self._notices = [notice for notice in (*self._notices, *new) if notice.time >= began]

    def picture(self, width: int, height: int | None) -> Text:
        return screen(self._files.state, self._notices, time.time(), width, height)
