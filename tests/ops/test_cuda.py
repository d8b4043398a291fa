"""The GPUs of this machine, asked in a separate process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drzero.ops.process.isolated import run_isolated
from drzero.ops.resources.cuda import Device, Sight, look, product_fault, read_sight
from drzero.ops.resources.gpu import gpus_here
from drzero.preflight.cuda import judge
from drzero.preflight.finding import Severity
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage

H100 = Device("H100")
EIGHT = Sight("2.11.0", "13.0", True, None, "", (H100,) * 8)


def put_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shell script the first nvidia-smi in the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def driver_files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_without_nvidia_smi_the_drivers_own_files_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    files = driver_files(tmp_path / "dev", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
    assert gpus_here(files) == 2
    assert gpus_here(driver_files(tmp_path / "none")) == 0


def test_an_nvidia_smi_that_hangs_keeps_nobody_waiting(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, "sleep 1000", monkeypatch)
    began = time.monotonic()
    assert gpus_here(driver_files(tmp_path / "dev", "nvidia0"), limit_s=0.5) == 1
    assert time.monotonic() - began < 60


def test_the_torch_of_a_cpu_on_a_gpu_machine_is_an_error_before_anything_loads(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'", monkeypatch)
    config = compose_stage("challenger", ["hardware=single_gpu", "model=smollm2-135m"])
    found = [one for one in preflight(config, "challenger", starting=True).findings if one.key == "CUDA"]
    assert [one.severity for one in found] == [Severity.ERROR]
    assert "is built without CUDA, and this machine has 1 GPU" in found[0].why
    assert "hardware=cpu" in found[0].fix


def test_a_process_of_its_own_says_what_torch_sees():
    # This environment has a torch without CUDA.
    sight = look({"CUDA_VISIBLE_DEVICES": "3"})
    assert (sight.cuda, sight.available, sight.visible, sight.devices) == (None, False, "3", ())
    assert sight.torch and sight.fault is None


def test_a_machine_without_a_usable_gpu_ends_its_check_with_1():
    done = subprocess.run([sys.executable, "-m", "drzero.ops.resources.cuda"], capture_output=True)
    assert done.returncode == 1 and json.loads(done.stdout)["available"] is False


def test_what_was_seen_before_the_driver_hung_is_kept():
    first = {"torch": "2.11.0", "cuda": "13.0", "available": True, "visible": None, "why": ""}
    lines = [json.dumps(first), json.dumps({"name": "H100", "fault": None})]
    script = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(1000)"
    ended = run_isolated((sys.executable, "-c", script), 2)
    sight = read_sight(ended)
    assert (sight.available, sight.devices) == (True, (H100,))
    assert [one.why for one in judge(sight, 8, 8)] == ["GPU 1 did not answer: it hung: no result after 2 s"]


def test_a_product_is_right_on_a_device_that_works_and_a_fault_on_one_that_is_not_there():
    assert product_fault("cpu") is None
    assert product_fault("meta:0") is not None


@pytest.mark.parametrize(
    ("sight", "severity", "says"),
    [
        (EIGHT, "note", "8 × H100; CUDA_VISIBLE_DEVICES not set; correct product on 8"),
        (Sight(fault="ImportError: libcudart.so.13"), "error", "torch did not start in a separate process"),
        (Sight("2.11.0", "13.0", False, None, "the driver is too old"), "error", "the driver is too old"),
        (Sight("2.11.0", "13.0", False, "", ""), "error", "torch sees 0 of this machine's 8 GPUs"),
        (Sight("2.11.0", "13.0", True, "0,1", "", (H100,) * 2), "error", "'0,1'"),
        (
            Sight("2.11.0", "13.0", True, None, "", (*(H100,) * 7, Device("H100", "ECC error"))),
            "error",
            "GPU 7: ECC error",
        ),
    ],
)
def test_what_is_wrong_with_the_gpus_of_a_machine_of_eight_is_named(sight, severity, says):
    (found,) = judge(sight, 8, 8)
    assert found.severity == severity
    assert says in f"{found.value} {found}"
