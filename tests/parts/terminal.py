"""A terminal for a command, with its screen, its size and its keys."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import pyte

PATIENCE_S = 60.0


class Terminal:
    """Runs a command on a pseudo-terminal and draws what it writes."""

    def __init__(self, command: Sequence[str], columns: int = 80, lines: int = 24, **variables: str) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._master, terminal = pty.openpty()
        self._set_size(terminal, columns, lines)
        kept = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=kept
            | {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2]), "TZ": "UTC"}
            | variables,
            preexec_fn=lambda: _own_terminal(terminal),
        )
        os.close(terminal)

    @property
    def display(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def scrolled(self) -> str:
        history = [
            "".join(line[column].data for column in range(self.screen.columns)).rstrip()
            for line in self.screen.history.top
        ]
        return "\n".join([*history, self.display])

    def read_until(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, self.display
            assert self._read() or seen(), self.scrolled

    def read_to_end(self) -> int:
        """Draw until the command has ended. Returns its exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Draw the next output. False at its end."""
        while not select.select([self._master], [], [], 0.1)[0]:
            if self.process.poll() is not None:
                return False
        with suppress(OSError):  # Linux: nobody has the terminal open any more
            data = os.read(self._master, 1 << 16)
            self.written += data
            self._stream.feed(data)
            return True
        return False

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size(self._master, columns, lines)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    @staticmethod
    def _set_size(descriptor: int, columns: int, lines: int) -> None:
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal_as_stdout() -> Iterator[Callable[[], str]]:
    """Make stdout a terminal. Yields a function that returns the text written to it, if it is short."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    with open(master, "rb", buffering=0) as seen, open(slave, "w") as stdout, redirect_stdout(stdout):

        def text() -> str:
            stdout.flush()
            data = b""
            while select.select([seen], [], [], 0)[0]:
                data += seen.read(1 << 16)
            return data.decode()

        yield text


@contextmanager
def stopped_terminal() -> Iterator[tuple[int, int]]:
    """Stdout is a terminal that somebody has stopped with Ctrl-S: what they see, and where it is stopped."""
    seen, terminal = os.openpty()
    tty.setraw(terminal)
    termios.tcflow(terminal, termios.TCOOFF)
    with open(seen, "rb"), open(terminal, "w") as stdout, redirect_stdout(stdout):
        yield seen, terminal
        termios.tcflow(terminal, termios.TCOON)


def _own_terminal(terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
