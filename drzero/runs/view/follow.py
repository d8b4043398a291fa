"""Shows a run while it runs: one live view on a terminal, else a line for each step, and events in both.

    with following(config):
        ...             # services and trainer run here, and what they say is drawn or printed meanwhile

A thread reads the run's folder every second. Only that thread writes to the terminal, so a stopped terminal
(Ctrl-S) stops no other part of the run. With `verbose=true`, lines are printed on a terminal too.
"""

import os
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.text import Text

from drzero.ops.console import announce, has_live_terminal, is_verbose, say, shown_by, takes_more
from drzero.ops.notices import Notice, notice_of
from drzero.recipe.metrics import is_training
from drzero.runs.view.run_state import RunFacts, RunFiles, RunState, shown_s
from drzero.runs.view.screen import screen
from verl_ext.trainer.step_metrics import progress_line, validation_line

_EVERY_S = 1.0


@contextmanager
def following(config: DictConfig, *, relayed: bool = False) -> Iterator[None]:
    """Show a run until the block ends. If `relayed`, its lines are printed already, so print none."""
    is_live = has_live_terminal() and not is_verbose()
    if relayed and not is_live:
        yield
        return
    files = RunFiles(Path(config.run.dir), RunFacts.of(config), since=time.time())
    files.poll()
    with LiveView(files.state) if is_live else nullcontext() as view:
        follower = _Follower(files, view, relayed)
        follower.start()
        try:
            yield
        finally:
            follower.close()
            files.state.close()


class LiveView:
    """Draws a run's state on the terminal, in the same place until the block ends."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._notices: list[Notice] = []
        self._above: deque[str] = deque()
        self._console = Console(highlight=False, markup=False)
        self._live = self._new_live()
        self._size = self._console.size
        self._shown = shown_by(self)

    def __enter__(self) -> "LiveView":
        self._shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Draw the state a last time, with every notice."""
        self._shown.__exit__(None, None, None)
        with suppress(OSError, ValueError):  # the terminal may have been closed
            if takes_more(1.0):
                self._begin()
                self._live.update(screen(self._state, self._notices, time.time(), self._size.width, None))
                self._live.stop()

    def notice(self, notice: Notice) -> None:
        """Show it below the figures, sorted by time: other processes' events are read late."""
        insort(self._notices, notice, key=lambda shown: shown.time)

    def line(self, text: str) -> None:
        """Print it above the view."""
        self._above.append(text)

    def draw(self) -> None:
        """Draw the present state, unless the terminal takes nothing."""
        if takes_more(0):
            self._begin()
            width, height = self._size
            picture = screen(self._state, self._notices, time.time(), width, height - 1)
            self._live.update(picture, refresh=True)

    def _begin(self) -> None:
        if self._console.size != self._size:
            self._size = self._console.size
            # The terminal may have wrapped the last picture, so its first line is unknown.
            self._live.stop()
            self._console.control(Control.clear(), Control.home())
            self._live = self._new_live()
        self._live.start()
        while self._above:
            self._console.print(Text(self._above.popleft()), soft_wrap=True)

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, vertical_overflow="crop")


class _Follower(threading.Thread):
    def __init__(self, files: RunFiles, view: LiveView | None, relayed: bool) -> None:
        super().__init__(name="view", daemon=True)
        self._files, self._view, self._relayed = files, view, relayed
        self._end = threading.Event()
        self._failure = ""

    def run(self) -> None:
        """Poll until closed, and once more."""
        while not self._end.wait(_EVERY_S):
            self._poll()
        self._poll()

    def close(self) -> None:
        """Show the rest and end, without waiting for a stopped terminal."""
        self._end.set()
        self.join(5.0)

    def _poll(self) -> None:
        try:
            steps, events = self._files.poll()
            for event in () if self._relayed else events:
                # This process prints its own events as they happen.
                if event.get("pid") != os.getpid() and (notice := notice_of(event)):
                    announce(notice)
            if self._view is not None:
                self._view.draw()
            else:
                for step in steps:
                    self._say(step)
        except Exception as error:  # a run must not end because it cannot be shown
            if self._failure != repr(error):
                self._failure = repr(error)
                say("view", f"cannot show the run: {error!r}", "warning")

    def _say(self, step: int) -> None:
        state = self._files.state
        metrics, steps = state.metrics[step], state.facts.steps
        if is_training(metrics):
            left = state.left_s(time.time()) if step < steps else None
            ends = f", about {shown_s(left)} left" if left is not None else ""
            say("trainer", progress_line(metrics, step, steps) + ends)
        if "drzero/val/rows" in metrics:
            say("trainer", validation_line(metrics, step))
