"""Ray gives veRL's pools GPUs in the order of CUDA_VISIBLE_DEVICES, the training pool first (veRL 0.9.1)."""

import json
import os
import subprocess
import sys

import pytest

from drzero.recipe.compose import compose_stage, process_env, resolve

POOLS = """
import json, sys, ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import ResourcePoolManager

training, sampling, cpus, visible = json.loads(sys.argv[1])
ray.init(num_cpus=cpus, num_gpus=visible, include_dashboard=False, object_store_memory=200_000_000)

@ray.remote(num_cpus=0)
class Worker:
    def ids(self):
        return ray.get_gpu_ids()

def pool(name, gpus, shared):
    manager = ResourcePoolManager({name: [gpus]}, mapping=None, max_colocate_count=shared)
    manager.create_resource_pool()
    (group,) = manager.resource_pool_dict[name].get_placement_groups(device_name="cuda")
    places = [PlacementGroupSchedulingStrategy(group, index) for index in range(gpus)]
    workers = [Worker.options(num_gpus=1 / shared, scheduling_strategy=one).remote() for one in places]
    return workers, sorted(sum(ray.get([worker.ids.remote() for worker in workers]), []))

# As in PPOTrainer._init_resource_pool_mgr, then one pool for each engine: RolloutReplica.init_standalone.
kept, trains = pool("global_pool", training, 3)
serves = []
for replica in range(sampling):
    workers, ids = pool(f"rollout_pool_{replica}", 1, 2)
    kept += workers
    serves += ids
print("ids", json.dumps([trains, sorted(serves)]))
"""


@pytest.mark.slow("starts a Ray")
@pytest.mark.parametrize(
    ("said", "trains", "serves"),
    [("4", "0123", "4567"), ("[0,1,2,3]", "4567", "0123"), ("[1,6]", "023457", "16")],
)
def test_the_gpus_that_are_named_serve_and_the_others_train(said, trains, serves):
    config = resolve(compose_stage("solver", ["compute=8xh100", f"machine.serve_gpus={said}"]))
    rollout = config.actor_rollout_ref.rollout
    sizes = [config.trainer.n_gpus_per_node, rollout.n_gpus_per_node, config.ray_kwargs.ray_init.num_cpus, 8]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **process_env(config)}
    command = [sys.executable, "-c", POOLS, json.dumps(sizes)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
    told = next(line for line in ran.stdout.splitlines() if line.startswith("ids "))
    assert json.loads(told.removeprefix("ids ")) == [list(trains), list(serves)]
