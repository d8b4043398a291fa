"""The command line itself: what it says of errors, and what it does not wait for."""

import subprocess
import sys
from importlib import import_module

import pytest

from pipeline.cli import _EXPECTED


@pytest.mark.parametrize("name", _EXPECTED)
def test_every_error_that_is_told_in_one_line_exists(name: str) -> None:
    module, _, error = name.partition(":")
    assert issubclass(getattr(import_module(module), error), Exception)


def test_a_mistyped_key_is_told_before_anything_large_is_imported() -> None:
    code = (
        "import sys; from pipeline.cli import main; code = main(['challenger', 'data.train_batch_sise=8']); "
        "print(code, sorted({'verl', 'ray', 'transformers', 'chromadb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n" and "data.train_batch_size" in done.stderr
