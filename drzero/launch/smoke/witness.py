"""Watches a run's processes: SGLang's schedulers, the ranks' libraries, the recorder's pipes."""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from drzero.ops.process.tree import descendants
from drzero.stages.watch import LANDMARKS

EVERY_S = 1.0
_SCHEDULER = re.compile(r"sglang::scheduler\S*")
FLASH_ATTENTION = "flash_attn_2_cuda"


class Witness:
    """Looks at the processes below this one and at a folder, once a second."""

    def __init__(self, recorder: Path) -> None:
        self._recorder = recorder
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)
        self.schedulers: dict[int, str] = {}
        """SGLang's, by pid. A title has the tensor-parallel rank."""
        self.ranks: set[int] = set()
        self.with_flash_attention: set[int] = set()
        """The ranks that have loaded flash-attn's library."""
        self.pipes: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        for process in descendants([os.getpid()])[os.getpid()]:
            if found := _SCHEDULER.match(process.title):
                self.schedulers[process.pid] = found[0]
            elif re.match(LANDMARKS.ranks, process.title):
                self.ranks.add(process.pid)
                with suppress(OSError):  # the process may have ended
                    if FLASH_ATTENTION in Path(f"/proc/{process.pid}/maps").read_text():
                        self.with_flash_attention.add(process.pid)
        with suppress(OSError):
            self.pipes |= {path.name for path in self._recorder.iterdir() if path.is_fifo()}
