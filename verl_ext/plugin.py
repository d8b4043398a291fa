"""Registers our extensions with veRL 0.9.1: `VERL_USE_EXTERNAL_MODULES=verl_ext.plugin`.

Every veRL process on every node imports this module while it imports `verl`.
"""

import os
from importlib import import_module

from verl.plugin.platform import PlatformRegistry
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from drzero.ops.proxies import spare_loopback
from verl_ext.rollout.platforms import CpuPlatform, CudaPlatform

REFERENCE_ROLLOUT = "reference"  # value of `actor_rollout_ref.rollout.name`


def _load_reference_replica() -> type:
    from verl_ext.rollout.reference_rollout import ReferenceReplica

    return ReferenceReplica


spare_loopback()
PlatformRegistry.register("cpu")(CpuPlatform)
PlatformRegistry.register("nvidia")(CudaPlatform)
RolloutReplicaRegistry.register(REFERENCE_ROLLOUT, _load_reference_replica)
# Shim for veRL 0.9.1: replicas have a public registry, their weight adapters only this dict. The test
# `test_veRL_still_has_no_public_registry_for_weight_adapters` fails when this can go.
rollout_base._ROLLOUT_REGISTRY[(REFERENCE_ROLLOUT, "async")] = (
    "verl_ext.rollout.reference_rollout.ReferenceServerAdapter"
)
if os.environ.get("VERL_PLATFORM") == "cpu":
    rollout_base._ROLLOUT_REGISTRY[("sglang", "async")] = "verl_ext.sglang.cpu_adapter.CpuServerAdapter"

for _module in ("packed_attention", "policy_loss", "trainers"):
    import_module(f"verl_ext.trainer.{_module}")
