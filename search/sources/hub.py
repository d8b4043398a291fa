"""A hub data set as a source: its tables, or else texts, are fetched into the hub's cache.

`fetch_data_set("hf://datasets/OWNER/NAME@REVISION/data/train*.parquet")`, or `OWNER/NAME`.
"""

import re
from pathlib import Path

from drzero.ops.hub import hub_fault
from search.sources.document import CorpusError
from search.sources.files import COMPRESSED, RECORDS, TEXTS

HUB_URL = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?(/(?P<path>.+))?")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_data_set(source: Path | str) -> bool:
    """Whether a source names a hub data set."""
    text = str(source)
    is_name = isinstance(source, str) and _NAME.fullmatch(text) and not text.endswith(RECORDS + TEXTS)
    return text.startswith("hf://") or bool(is_name and not Path(text).exists())


def fetch_data_set(source: str) -> Path:
    """Fetch a data set's missing files. Returns the folder or pattern to read. Raises CorpusError."""
    match = HUB_URL.fullmatch(source if source.startswith("hf://") else f"hf://datasets/{source}")
    if match is None:
        raise CorpusError(
            f"{source} names no data set: write hf://datasets/OWNER/NAME, with /FILE for a part"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repo, path = match["repo"], match["path"]
    fault = hub_fault()
    packed = ("", *COMPRESSED)
    kinds = [[f"*{suffix}{end}" for suffix in of_kind for end in packed] for of_kind in (RECORDS, TEXTS)]
    try:
        for patterns in [[path, f"{path}/*"]] if path else kinds:
            folder = Path(
                snapshot_download(
                    repo,
                    repo_type="dataset",
                    revision=match["revision"],
                    allow_patterns=patterns,
                    local_files_only=fault is not None,
                )
            )
            if any(
                file.is_file() for pattern in patterns for file in folder.rglob(pattern.rpartition("/")[2])
            ):
                return folder / path if path else folder
    except (OSError, ValueError, HfHubHTTPError) as error:
        is_name = "" if source.startswith("hf://") else f"there is no file or folder {source!r}, and "
        raise CorpusError(
            f"{is_name}the data set {repo} cannot be fetched, nor does the hub's cache hold it "
            f"({fault or str(error).splitlines()[0]}). Check the name, the connection and HF_HUB_OFFLINE, or "
            "download it and give its path"
        ) from error
    raise CorpusError(f"the data set {repo} has no file {path or 'of a kind that can be read'}")
