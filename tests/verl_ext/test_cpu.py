"""The CPU as a veRL platform, and the plugin's registrations."""

import inspect
import subprocess
import sys

import pytest
import torch
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
)
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_ext import plugin
from verl_ext.rollout.platforms import CpuPlatform, CudaPlatform
from verl_ext.trainer import trainers

# The worker is the first import, as in a run.
_IN_A_RUN = """
from verl_ext.rollout import cpu_worker
from verl.plugin.platform import get_platform
print(cpu_worker.CpuActorRolloutRefWorker.__name__, get_platform().device_name)
"""


def test_verl_uses_the_platform_in_a_run_and_can_import_the_worker():
    environment = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin", "PATH": ""}
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, "-c", _IN_A_RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].split() == ["CpuActorRolloutRefWorker", "cpu"]


def test_verl_never_detects_the_cpu_by_itself():
    assert PlatformRegistry.get("cpu") is CpuPlatform
    assert not CpuPlatform().is_platform_available(use_smi_check=True)
    assert not CpuPlatform().is_platform_available()


def test_verl_detects_our_cuda_platform_under_its_own_name():
    # If veRL renamed it, engines would start with the trainer's recorder again.
    assert PlatformRegistry.get("nvidia") is CudaPlatform
    own = CudaPlatform.__mro__[1]
    assert (own.__module__, own.__name__) == ("verl.plugin.platform.platform_cuda", "PlatformCUDA")


@pytest.mark.parametrize("platform", [CpuPlatform(), CudaPlatform()])
def test_engines_do_not_get_the_trainers_recorder(platform):
    recorded = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/rank_"}
    environment = recorded | platform.rollout_env_vars()
    assert environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == ""
    assert environment["TORCH_FR_BUFFER_SIZE"] == environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "0"
    stock = super(type(platform), platform).rollout_env_vars()
    assert stock.items() <= environment.items()


def test_the_device_module_has_memory_random_state_and_torch_cpu():
    module = CpuPlatform().device_module
    free, total = module.mem_get_info()
    assert 0 < free <= total
    assert 1 << 20 < module.memory_allocated() <= total
    assert module.max_memory_allocated() >= module.memory_allocated() // 2
    assert module.memory_reserved() > 0 and module.max_memory_reserved() > 0
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    module.manual_seed(5)
    again = torch.rand(3)
    module.manual_seed_all(5)
    assert torch.equal(torch.rand(3), again)
    # Everything else is torch.cpu's.
    assert module.is_available() and module.get_device_name() == "cpu"
    assert module.device_count is torch.cpu.device_count
    with pytest.raises(AttributeError):
        _ = module.no_such_call


def test_every_call_of_a_platform_exists_and_does_nothing():
    platform = CpuPlatform()
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    platform.profiler_start()
    platform.profiler_stop()
    with platform.nvtx_range("x"):
        assert (platform.device_name, platform.current_device(), platform.device_count()) == ("cpu", "cpu", 1)
    assert platform.communication_backend_name() == "gloo"
    assert not platform.is_ipc_supported()


MODES = {"sync": PPOTrainerSync, "colocate_async": PPOTrainerColocateAsync}
MODES["separate_async"] = PPOTrainerSeparateAsync


@pytest.mark.parametrize(("mode", "base"), MODES.items(), ids=MODES)
@pytest.mark.parametrize("method", [trainers.HRPO, trainers.GRPO], ids=lambda method: method.name)
def test_a_trainer_is_registered_by_method_and_mode(method, mode, base):
    trainer = get_trainer_cls(f"drzero_{method.name}_{mode}")
    assert issubclass(trainer, trainers.GroupRelativeTrainer) and issubclass(trainer, base)
    assert (trainer.method, trainer.base_mode) == (method, mode)


def test_the_reference_engine_is_registered_as_a_rollout():
    from verl_ext.rollout.reference_rollout import ReferenceReplica, ReferenceServerAdapter

    assert get_rollout_replica_class(plugin.REFERENCE_ROLLOUT) is ReferenceReplica
    assert rollout_base.get_rollout_class(plugin.REFERENCE_ROLLOUT, "async") is ReferenceServerAdapter


def test_veRL_still_has_no_public_registry_for_weight_adapters():
    public = [
        name
        for name, member in vars(rollout_base).items()
        if not name.startswith("_")
        and getattr(member, "__module__", None) == rollout_base.__name__
        and ("regist" in name.lower() or any("regist" in part.lower() for part in vars(member)))
    ]
    assert not public, (
        f"veRL's rollout base now has {public}: register the reference adapter there and drop the shim in "
        "verl_ext/plugin.py that writes into _ROLLOUT_REGISTRY"
    )
    assert inspect.isfunction(rollout_base.get_rollout_class)
