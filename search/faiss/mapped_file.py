"""An index file of FAISS, mapped into memory.

    index = map_index(Path("wiki/e5_Flat.index"))

Flat, HNSW and IVF indices then lie in the file's pages, so that an index is open at once and several
processes of a machine share them. FAISS can map a file itself (`read_index` of a path with
`IO_FLAG_MMAP_IFC`), but where a header is cut off it ends the process with a segmentation fault
(faiss-cpu 1.15.1); given the bytes, it raises. So the file is mapped here.
"""

from pathlib import Path
from typing import Any

import faiss
import numpy as np


def map_index(path: Path) -> Any:
    """Return the index in a file; raises RuntimeError for a file that is none or is cut off, and OSError."""
    if not path.stat().st_size:
        raise RuntimeError("the file is empty")  # which cannot be mapped
    file_bytes = np.memmap(path, dtype=np.uint8, mode="r")
    library: Any = faiss  # whose stubs lack this class
    reader = library.ZeroCopyIOReader(faiss.swig_ptr(file_bytes), file_bytes.size)
    index: Any = faiss.read_index(reader, faiss.IO_FLAG_MMAP_IFC)
    # The last list of an IVF index may end beyond the bytes without an error.
    if reader.rp_ > file_bytes.size:
        raise RuntimeError(f"{reader.rp_ - file_bytes.size} bytes are missing at its end")
    index.referenced_objects = [file_bytes]  # as FAISS keeps what an index refers to
    return index
