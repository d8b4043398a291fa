"""A Ray of eight logical GPUs as for hardware=8xh100: its CPUs, and the environment of its engines."""

import multiprocessing
import os
import time

import pytest
import ray
import transfer_queue as tq
from verl.single_controller.ray import ResourcePoolManager

from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.flight_recorder import recorder_env
from verl_ext.rollout.platforms import CudaPlatform

pytestmark = pytest.mark.slow("starts Ray and eight storage units")


@pytest.fixture(scope="module")
def config():
    return resolve(compose_stage("solver", ["hardware=8xh100"]))


@pytest.fixture(scope="module")
def cluster(config, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in recorder_env(tmp_path_factory.mktemp("recorder")).items():
            patch.setenv(name, value)
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            num_cpus=config.ray_kwargs.ray_init.num_cpus,
            num_gpus=config.machine.gpus,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
        )
        tq.init(config.transfer_queue)
        yield
        tq.close()
        ray.shutdown()


@pytest.mark.timeout(300)
def test_verl_gets_its_placement_group_and_a_few_cpus_are_left(cluster, config):
    # With fewer CPUs veRL would wait here forever. With many more, Ray would start needless workers.
    trainer = config.trainer
    pools = ResourcePoolManager({"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}, mapping={})
    pools.create_resource_pool()
    pools.resource_pool_dict["global_pool"].get_placement_groups(device_name="cuda")
    # Ray's accounting lags by a second or two.
    while ray.available_resources().get("GPU", 0) > 0:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == 4


@ray.remote
class Server:
    """Starts processes like SGLang's schedulers."""

    def in_a_scheduler(self, names):
        with multiprocessing.get_context("spawn").Pool(1) as scheduler:
            return dict(zip(names, scheduler.map(os.getenv, names), strict=True))


def test_an_engines_schedulers_do_not_record(cluster):
    names = ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    rank, engine = (
        # As in SGLangReplica.launch_servers.
        Server.options(num_cpus=0, runtime_env={"env_vars": variables}).remote()
        for variables in ({}, CudaPlatform().rollout_env_vars())
    )
    size, older, pipe = ray.get(rank.in_a_scheduler.remote(names)).values()
    assert size == older == "2000" and pipe.endswith("/rank_")
    assert list(ray.get(engine.in_a_scheduler.remote(names)).values()) == ["0", "0", ""]
