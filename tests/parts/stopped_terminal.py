"""A terminal that somebody has stopped."""

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def stopped_terminal() -> Iterator[tuple[int, int]]:
    """Stdout is a terminal that somebody has stopped with Ctrl-S: what they see, and where it is stopped."""
    seen, terminal = os.openpty()
    tty.setraw(terminal)
    termios.tcflow(terminal, termios.TCOOFF)
    with open(seen, "rb"), open(terminal, "w") as stdout, redirect_stdout(stdout):
        yield seen, terminal
        termios.tcflow(terminal, termios.TCOON)
