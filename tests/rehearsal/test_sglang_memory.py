"""The memory ledger agrees with a real SGLang of the pinned version, on a CPU."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow("imports SGLang and builds every shipped model")


def test_the_ledger_of_every_shipped_model_equals_sglangs(sglang_python):
    compared = subprocess.run(
        [sglang_python, "-W", "ignore", "-m", "bench.sglang_memory"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert compared.returncode == 0, compared.stdout[-3000:] + compared.stderr[-3000:]
    difference = re.search(r"Largest difference: ([\d.]+) %", compared.stdout)
    assert difference and float(difference[1]) < 1
    page = (ROOT / "bench" / "README.md").read_text()
    quoted = re.findall(r"^\| .*", page.partition("## Memory ledger")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(quoted) > 10 and {*quoted} <= {*compared.stdout.splitlines()}
