"""What a Chroma server allows its client: settings, because the server's operator decides.

    place = replace(ChromaPlace.parse("http://one:8000"), quota=Quota(page=300, reads=10))
    with place.quota.reading(place.text): ...    # waits while ten others read there

Chroma Cloud's default quotas are 300 records a call, 10 reads at once, and 5 M records a collection, of which
the last is checked before an index is built (`drzero.preflight.index_size`). A folder has no quotas.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_lock = threading.Lock()
_semaphores: dict[tuple[str, int], threading.BoundedSemaphore] = {}
"""Of this process, by place and the number of reads: all shards of a server share its quota."""


@dataclass(frozen=True)
class Quota:
    """Records of a call that writes an index or pages over one, and queries at once; None is no limit."""

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
