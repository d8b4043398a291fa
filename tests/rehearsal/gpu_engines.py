"""Builds the arguments of SGLang's servers on 8×H100, for veRL's rollout engines and the solver's server.

    .venv-sglang/bin/python tests/rehearsal/gpu_engines.py < case.json

A case is a stage with its overrides. The last line printed is JSON, for `test_gpu_path.py`. The config,
veRL's replica and server, and SGLang's own parser are real. The GPUs are fake (`fake_cuda.py`), and no
process starts.
"""

import asyncio
import dataclasses
import json
import os
import sys

import fake_cuda
from omegaconf import OmegaConf

from drzero.recipe.compose import compose_stage, resolve, write_resolved


class Launched(Exception):
    """The arguments with which the engine's processes would start."""


def rollout_arguments(config):
    """SGLang's arguments for the first replica, and its number of GPUs."""
    from sglang.srt.entrypoints.http_server import Engine
    from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    replica = get_rollout_replica_class(rollout.name, disaggregation_enabled=rollout.disaggregation.enabled)(
        replica_rank=0, config=rollout, model_config=model, gpus_per_node=rollout.n_gpus_per_node
    )

    def launch(server_args, **_):
        raise Launched(server_args)

    Engine._launch_subprocesses = staticmethod(launch)
    server = SGLangHttpServer(
        config=replica.config,
        model_config=replica.model_config,
        rollout_mode=RolloutMode.HYBRID,
        workers=[],
        replica_rank=0,
        node_rank=0,
        nnodes=replica.nnodes,
        cuda_visible_devices=",".join(map(str, range(replica.world_size))),
        base_gpu_id=0,
    )
    try:
        asyncio.run(server.launch_server())
    except Launched as launched:
        return launched.args[0], replica.world_size
    raise AssertionError("veRL launches SGLang's processes in another way")


def checked(arguments):
    """Arguments after SGLang's own checks."""
    arguments.check_server_args()
    return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}


def main():
    stage, overrides = json.load(sys.stdin)
    config = resolve(compose_stage(stage, overrides))
    # As veRL's trainer imports it, without touching its kernels.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import common
    from verl.workers.rollout.sglang_rollout import async_sglang_server  # noqa: F401

    from drzero.stages.services import solver_spec

    del os.environ["SGLANG_USE_CPU_ENGINE"]
    fake_cuda.stand_in()
    fake_cuda.torch.version.cuda = "13.0"
    for function in vars(common).values():
        if hasattr(function, "cache_clear"):  # what SGLang remembers about devices
            function.cache_clear()
    written = OmegaConf.load(write_resolved(config))
    rollout, gpus = rollout_arguments(written)
    solver = prepare_server_args(list(solver_spec(config).command[3:]))
    facts = {"gpus": gpus, "rollout": checked(rollout), "solver": checked(solver)}
    print(json.dumps(facts, default=str))


if __name__ == "__main__":
    main()
