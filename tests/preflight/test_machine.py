"""The GPUs at hand, as the memory ledger takes them."""

from types import SimpleNamespace

import pytest

from drzero.ops.resources.gpu import GpuSample
from drzero.preflight import machine
from drzero.preflight.machine import declared_machine
from drzero.recipe.compose import compose_plain, resolve


@pytest.mark.parametrize(
    ("driver", "total_mb", "memory_gib", "tflops"),
    [
        ("NVIDIA H200", 143_771, 139.8, 989),
        ("NVIDIA H100 80GB HBM3", 81_559, 79.2, 989),
        ("NVIDIA A100-SXM4-80GB", 81_920, 79.2, 312),
        ("NVIDIA A100-PCIE-40GB", 40_960, 39.4, 312),
        ("NVIDIA A10G", 23_028, 22.1, 70),
        ("NVIDIA L4", 23_034, 22.0, 121),
        ("NVIDIA L40S", 46_068, 44.4, 362),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, 94.9, 504),
        ("Tesla T4", 15_360, 14.6, 65),
        ("a card of next year", 204_800, 200.0, 989),
        ("", 24_576, 24.0, 989),
    ],
)
def test_a_local_machine_has_the_memory_of_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, driver: str, total_mb: int, memory_gib: float, tflops: float
) -> None:
    config = resolve(compose_plain("solver", ["hardware=single_gpu", "model=demo-policy"]))
    sample = GpuSample(0, 0, total_mb, 0, name=driver)
    monkeypatch.setattr(machine, "Gpus", lambda: SimpleNamespace(read=lambda: [sample]))
    gpu = declared_machine(config, starting=True).gpu
    assert gpu is not None and gpu.memory_gib == pytest.approx(memory_gib, rel=0.001)
    assert gpu.bf16_tflops == tflops


def test_a_machine_that_is_rented_elsewhere_has_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(compose_plain("solver", ["compute=single_h100", "hardware=single_gpu"]))
    sample = GpuSample(0, 0, 143_771, 0, name="NVIDIA H200")
    monkeypatch.setattr(machine, "Gpus", lambda: SimpleNamespace(read=lambda: [sample]))
    gpu = declared_machine(config, starting=False).gpu
    assert gpu is not None and gpu.name == "H100"
