"""A Chroma server's limits for its client: settings, because the server's operator decides.

Chroma Cloud's default quotas are 300 records per call, 10 reads at once, and 5 M records per collection.
`drzero.preflight.index_size` checks the last. Folders have no quotas.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_lock = threading.Lock()
_semaphores: dict[tuple[str, int], threading.BoundedSemaphore] = {}
"""By place and number of reads: all shards of a server share its quota."""


@dataclass(frozen=True)
class Quota:
    """Most records per call that writes an index or pages over one, and most queries at once (None: no
    limit).
    """

    page: int = 250
    reads: int | None = None

    @contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Wait until one more query may be sent to this place, and send it inside."""
        if self.reads is None:
            yield
            return
        with _lock:
            semaphore = _semaphores.setdefault((place, self.reads), threading.BoundedSemaphore(self.reads))
        with semaphore:
            yield
