"""Files as a bad disk leaves them."""

from pathlib import Path

import pyarrow.parquet as pq


def damage_pages(path: Path) -> None:
    """Overwrite all of a parquet file but its footer, so that it still opens."""
    content = path.read_bytes()
    # The last eight bytes are the footer's length, little-endian, and the magic.
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:4] + b"\xff" * (footer - 4) + content[footer:])
    assert pq.read_schema(path).names
