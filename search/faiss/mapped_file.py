"""Map an index file of FAISS into memory, so that it opens at once and processes share its pages.

FAISS can map a file itself (`read_index` of a path with `IO_FLAG_MMAP_IFC`), but a cut-off header ends the
process with a segmentation fault (faiss-cpu 1.15.1). Given the bytes, it raises.
"""

from pathlib import Path
from typing import Any

import faiss
import numpy as np


def map_index(path: Path) -> Any:
    """Return the index in a file. Raises RuntimeError for a bad or cut-off file, and OSError."""
    if not path.stat().st_size:
        raise RuntimeError("the file is empty")  # which cannot be mapped
    file_bytes = np.memmap(path, dtype=np.uint8, mode="r")
    library: Any = faiss  # whose stubs lack this class
    reader = library.ZeroCopyIOReader(faiss.swig_ptr(file_bytes), file_bytes.size)
    index: Any = faiss.read_index(reader, faiss.IO_FLAG_MMAP_IFC)
    # FAISS does not notice if the last list of an IVF index ends beyond the bytes.
    if reader.rp_ > file_bytes.size:
        raise RuntimeError(f"{reader.rp_ - file_bytes.size} bytes are missing at its end")
    index.referenced_objects = [file_bytes]  # FAISS's own way to keep them alive
    return index
