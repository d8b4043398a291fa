"""The memory ledger agrees with the arithmetic of a real SGLang of the pinned version, on a CPU."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow("imports SGLang and builds every shipped model")


def test_weights_cache_and_graphs_of_every_shipped_model_are_what_sglang_computes(sglang_python: str) -> None:
    compared = subprocess.run(
        [sglang_python, "-W", "ignore", "-m", "bench.sglang_memory"],
        **{"cwd": ROOT, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}},
        **{"capture_output": True, "text": True, "timeout": 600},
    )
    assert compared.returncode == 0, compared.stdout[-3000:] + compared.stderr[-3000:]
    difference = re.search(r"Largest difference: ([\d.]+) %", compared.stdout)
    assert difference and float(difference[1]) < 1
    # The tables of bench/README.md are these.
    assert {*compared.stdout.splitlines()} <= {*(ROOT / "bench" / "README.md").read_text().splitlines()}
