"""What veRL loads from us: `VERL_USE_EXTERNAL_MODULES=verl_ext.plugin` (veRL 0.9.1).

Every veRL process imports this module while it imports `verl`, so it holds registrations only. The platform
and the rollout engine are named here and loaded by the process that needs them; the trainers must be known by
the time veRL looks one up, and veRL offers no later hook than this.
"""

from importlib import import_module

from verl.plugin.platform import PlatformRegistry
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_ext.cpu_platform import CpuPlatform

REFERENCE_ROLLOUT = "reference"
"""`actor_rollout_ref.rollout.name` of the reference engine."""


def _load_reference_replica() -> type:
    from verl_ext.reference_rollout import ReferenceReplica

    return ReferenceReplica


PlatformRegistry.register("cpu")(CpuPlatform)
RolloutReplicaRegistry.register(REFERENCE_ROLLOUT, _load_reference_replica)
# Shim for veRL 0.9.1: replicas have a public registry, their weight adapters only this dict. The test
# `test_veRL_still_has_no_public_registry_for_weight_adapters` says when it can go.
rollout_base._ROLLOUT_REGISTRY[(REFERENCE_ROLLOUT, "async")] = (
    "verl_ext.reference_rollout.ReferenceServerAdapter"
)

import_module("verl_ext.trainers")
