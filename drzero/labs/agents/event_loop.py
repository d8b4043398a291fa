"""Find the line that blocks the event loop, and for how long.

    with LoopWatch(asyncio.get_running_loop(), own=agent_folder) as watch: …
    watch.worst                            # Pause(2.0, "my_agent.py:12 in run: time.sleep(2)")

While a heartbeat is late, a thread reads the loop's stack. A pause is one long step of one task, no import.
C code that holds the interpreter stops that thread too, so it stays unseen.
"""

import asyncio
import linecache
import site
import sys
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

_BEAT_S = 0.02
_LATE_S = 0.1  # read the stack when a heartbeat is this late
_HERE = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple(
    {
        *(str(Path(path).resolve()) for path in (*site.getsitepackages(), site.getusersitepackages())),
        *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")),
        "<frozen",
    }
)


@dataclass(frozen=True)
class Pause:
    """A time the loop was blocked."""

    seconds: float
    place: str


class LoopWatch:
    """Watches the loop of the thread that enters it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: Path | None = None) -> None:
        self._loop, self._own = loop, str(own) if own else None
        self._thread_id = threading.get_ident()
        self._beaten = time.perf_counter()
        self._ended = threading.Event()
        self.worst = Pause(0.0, "")
        self.latest_s = 0.0  # how late the loop was at worst, for any reason

    def __enter__(self) -> Self:
        self._beaten = time.perf_counter()
        self._handle = self._loop.call_later(_BEAT_S, self._beat)
        self._watcher = threading.Thread(target=self._watch, name="event-loop-watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._handle.cancel()
        self._watcher.join()

    def _beat(self) -> None:
        now = time.perf_counter()
        self.latest_s = max(self.latest_s, now - self._beaten - _BEAT_S)
        self._beaten = now
        self._handle = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        step: object = None
        since, places = 0.0, Counter[str]()
        while not self._ended.wait(_BEAT_S):
            now, beaten = time.perf_counter(), self._beaten
            frame = sys._current_frames().get(self._thread_id)
            if frame is None or now - beaten < _BEAT_S + _LATE_S:
                step = None
                continue
            place = place_of(frame, self._own)
            task = asyncio.current_task(self._loop)
            # A callback is no task, so its line tells it from the next one.
            doing = (beaten, place if task is None else id(task))
            if doing != step or place is None:
                step, since, places = doing, now, Counter()
            if place is not None:
                places[place] += 1
                # It had been there before this look.
                seconds = now - since + _BEAT_S
                if seconds > self.worst.seconds:
                    self.worst = Pause(seconds, places.most_common(1)[0][0])


def place_of(frame: FrameType, own: str | None) -> str | None:
    """The agent's line in a stack, and the library line below it. None during an import."""
    stack = [frame]
    while stack[-1].f_back is not None:
        stack.append(stack[-1].f_back)
    if any(one.f_code.co_filename.startswith("<frozen importlib") for one in stack):
        return None
    inner = stack[0]
    user = next((one for one in stack if _is_users(one.f_code.co_filename, own)), inner)
    said = _line(user)
    return said if user is inner else f"{said} (in {inner.f_code.co_qualname}, {_short(inner)})"


def _is_users(file: str, own: str | None) -> bool:
    if file.startswith(_HERE):
        return False
    if own is not None and file.startswith(own) and "site-packages" not in file[len(own) :]:
        return True
    return not file.startswith(_LIBRARIES)


def _line(frame: FrameType) -> str:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{_short(frame)} in {frame.f_code.co_name}: {code}"


def _short(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
