"""Files of yours that an override names: a container gets them where it finds them.

    words, files = carried(["agent=my_agent.py:answer", "tasks=questions.jsonl"])     # Raises LaunchError

Modal adds them when a container starts, as the scripts of a run file, so none gets into an image. Large ones
belong on the corpus volume (`--action upload`).
"""

from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from drzero.launch.errors import LaunchError
from drzero.launch.image.image import EXTRA, REMOTE, ROOT, SOURCE

_KEYS = ("agent", "tasks", "compare.data")


def carried(overrides: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The overrides with places as a command in a container finds them, and the files to give it.

    Raises LaunchError for a file that is not here. A full path may be on a volume.
    """
    words, files = [], dict[str, None]()
    for word in overrides:
        key, _, value = word.partition("=")
        named = value.strip("'\"")
        if key == "agent":
            file, is_file, _ = named.rpartition(".py:")
            named = f"{file}.py" if is_file else ""
        here = Path(named).expanduser()
        if key not in _KEYS or not named:
            pass
        elif here.is_file():
            word = word.replace(named, _there(here.resolve(), files), 1)
        elif not here.is_absolute() and "$" not in named:
            raise LaunchError(f"{word}: there is no file {named} here")
        words.append(word)
    return words, tuple(files)


def _there(here: Path, files: dict[str, None]) -> str:
    if here.is_relative_to(ROOT) and (inside := here.relative_to(ROOT)).parts[0] in SOURCE:
        return str(inside)
    files[str(here)] = None
    return f"{relpath(EXTRA, REMOTE)}/{here.name}"
