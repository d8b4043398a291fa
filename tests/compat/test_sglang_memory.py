"""The memory ledger agrees with the arithmetic of a real SGLang of the pinned version, on a CPU.

    DRZERO_SGLANG_PYTHON=/path/to/its/bin/python pytest tests/compat/test_sglang_memory.py

In the environment of test_sglang_server.py.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("DRZERO_SGLANG_PYTHON")
if not PYTHON:
    pytest.skip("no SGLang: set DRZERO_SGLANG_PYTHON (docs/modal-image.md)", allow_module_level=True)
ROOT = Path(__file__).parent.parent.parent


def test_weights_cache_and_graphs_of_every_shipped_model_are_what_sglang_computes() -> None:
    compared = subprocess.run(
        [PYTHON, "-W", "ignore", "-m", "bench.sglang_memory"],
        **{"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}},
        **{"capture_output": True, "text": True, "timeout": 600},
    )
    assert compared.returncode == 0, compared.stdout[-3000:] + compared.stderr[-3000:]
    difference = re.search(r"Largest difference: ([\d.]+) %", compared.stdout)
    assert difference and float(difference[1]) < 1
    # The tables of bench/README.md are these.
    assert {*compared.stdout.splitlines()[:-1]} <= {*(ROOT / "bench" / "README.md").read_text().splitlines()}
