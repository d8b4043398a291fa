"""Each test fails once its shim for a CUDA part of SGLang can go."""

import os
import subprocess

import pytest

from verl_ext.sglang.cpu import environment

pytestmark = pytest.mark.slow("imports SGLang")


def run(python, script):
    """Run a script in the environment with SGLang."""
    env = {**os.environ, **environment(tp=1)}
    return subprocess.run([python, "-c", script], env=env, capture_output=True, text=True)


def test_sglang_still_imports_its_cuda_kernels_on_a_cpu(sglang_python):
    # Otherwise `verl_ext/sglang/without_cuda/sgl_kernel` can go.
    script = (
        "import sys; sys.path = [place for place in sys.path if not place.endswith('without_cuda')]\n"
        "import sglang.srt.mem_cache.memory_pool_host"
    )
    assert "No module named 'sgl_kernel'" in run(sglang_python, script).stderr


def test_torchvision_for_cuda_still_fails_next_to_a_torch_without(sglang_python):
    # Otherwise `verl_ext/sglang/without_cuda/torchvision_operators.py` can go.
    script = """
import importlib.util, pathlib, sys, torch
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "_DeclareOperators"]
folder = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
is_for_cuda = "+cu" in (folder / "version.py").read_text()
try:
    import torchvision
    fault = ""
except RuntimeError as error:
    fault = str(error)
print("torchvision::nms" in fault, is_for_cuda and torch.version.cuda is None)
"""
    fails, is_a_mixed_pair = run(sglang_python, script).stdout.split()
    assert fails == is_a_mixed_pair


def test_sglang_still_cannot_send_tensors_of_host_memory(sglang_python):
    # Otherwise `CpuServerAdapter` can go.
    script = """
import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
MultiprocessingSerializer.serialize(torch.zeros(2))
"""
    assert "IndexError" in run(sglang_python, script).stderr


def test_sglangs_adapters_still_need_pinned_memory(sglang_python):
    # Otherwise preflight can allow unmerged LoRA with `hardware=cpu rollout=sglang`.
    script = """
import torch
from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA
base = torch.nn.Linear(2, 2)
base.output_partition_sizes = [2]
ColumnParallelLinearWithLoRA(base, None)
"""
    assert "pin_memory=True requires" in run(sglang_python, script).stderr


def test_our_table_of_server_arguments_is_that_of_the_installed_sglang(sglang_python):
    # Else run `python -m verl_ext.sglang.read_arguments` there.
    script = """
import dataclasses
from sglang.srt.server_args import ServerArgs
from verl_ext.server_arguments import sglang_arguments
from verl_ext.sglang.read_arguments import read_arguments
sort = lambda one: dataclasses.replace(one, choices=tuple(sorted(map(str, one.choices))))
both = read_arguments(ServerArgs), sglang_arguments()
found, table = ({name: sort(one) for name, one in each.items()} for each in both)
print(found == table)
"""
    assert run(sglang_python, script).stdout.strip() == "True"
