"""A load test of veRL's queues and replay buffer without a model (veRL 0.9.1), for `drzero flow-test`.

python -m verl_ext.trainer.flow_load RUN_DIR/resolved.yaml
"""

import asyncio
import itertools
import random
import signal
import sys
import time
from contextlib import suppress
from typing import Any, cast

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu

from drzero.ops.telemetry import waiting

FAULTS = ("none", "stopped-producer", "slow-consumer", "overflow", "stale", "lost")


class LoadWorker:
    """Replaces veRL's agent loop worker, a Ray actor: sleeps for a rollout, then writes its rows."""

    def __init__(self, settings: dict[str, Any]) -> None:
        tq.init()
        self._settings = settings
        self._slots = asyncio.Semaphore(settings["concurrency"])
        self._random = random.Random(settings["worker"])
        self._fault_at = float("inf")
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, fault_at: float) -> None:
        """Inject the fault from this Unix time on."""
        self._fault_at = fault_at

    async def generate_sequences(self, uids: list[str], step: int) -> None:
        """Start these groups without waiting for them."""
        for uid in uids:
            task = asyncio.create_task(self._run_prompt(uid, step))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_prompt(self, uid: str, step: int) -> None:
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        rows = [f"{uid}_{session}_0" for session in range(self._settings["rollouts"])]
        results = await asyncio.gather(*(self._rollout(row, step) for row in rows), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        for error in errors[:1]:
            print(f"flow-test: a row could not be written: {type(error).__name__}: {error}", flush=True)
        if self._has("lost") and self._random.random() < 0.5:
            # As if the clean-up after a dead worker removed too much.
            await tq.async_kv_clear(keys=[uid, *rows], partition_id="train")
            return
        status = "failure" if errors else "finished"
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": status})

    async def _rollout(self, key: str, step: int) -> None:
        with waiting("rollout"):
            async with self._slots:
                if self._has("stopped-producer"):
                    await asyncio.Event().wait()
                if mean_s := self._settings["rollout_s"]:
                    await asyncio.sleep(self._random.expovariate(1 / mean_s))
        length = self._random.randint(8, self._settings["tokens"])
        tokens = torch.nested.as_nested_tensor([torch.randint(1000, (length,))], layout=torch.jagged)
        row = TensorDict({"input_ids": tokens}, batch_size=1)
        with waiting("put"):
            await tq.async_kv_batch_put(
                keys=[key],
                fields=row,
                tags=[{"status": "success", "seq_len": length, "global_steps": step}],
                partition_id="train",
            )

    def _has(self, fault: str) -> bool:
        return bool(self._settings["provoke"] == fault) and time.time() >= self._fault_at


class LoadManager:
    """Replaces veRL's agent loop manager and deals prompts to the workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        worker: Any = ray.remote(LoadWorker)
        workers = settings["workers"]
        share = {**settings, "concurrency": max(settings["concurrency"] // workers, 1)}
        self._workers: list[Any] = [
            worker.options(num_cpus=1, max_concurrency=1000).remote({**share, "worker": number})
            for number in range(workers)
        ]

    def begin(self, fault_at: float) -> None:
        """Set when the fault begins, and wait for every worker."""
        ray.get([worker.begin.remote(fault_at) for worker in self._workers])

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch a batch without waiting for its rollouts."""
        uids, step = [str(uid) for uid in prompts["uid"]], int(prompts["global_steps"])
        shares = [uids[number :: len(self._workers)] for number in range(len(self._workers))]
        calls = zip(self._workers, shares, strict=True)
        ray.get([worker.generate_sequences.remote(share, step) for worker, share in calls])


class TimeUp(Exception):
    """The test's time is over."""


class LoadMixin:
    """For one of our trainer classes: invented prompts, and an update that only takes time."""

    def set_up(self, settings: dict[str, Any]) -> None:
        """Replace veRL's set-up, without model and data."""
        self._settings = settings
        self._numbers = itertools.count()
        self._fault_at = float("inf")
        self.global_steps = 1
        self.current_mode = HybridEngineMode.TRAINER
        self.agent_loop_manager = LoadManager(settings)

    def run(self, seconds: float) -> None:
        """Run training steps until the time is over."""
        trainer: Any = self
        self.agent_loop_manager.begin(float("inf"))  # the workers may take long to start
        self._fault_at = time.time() + 0.3 * seconds
        self.agent_loop_manager.begin(self._fault_at)

        def end(*_: object) -> None:
            raise TimeUp

        with trainer._flow.writing(trainer.config.flow.every_s), suppress(TimeUp):
            # The signal interrupts any wait, and repeats in case the first exception is swallowed.
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                trainer.on_train_begin()
                while True:
                    batch = trainer.step({}, {})
                    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
                    trainer.global_steps += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                trainer._heartbeat.beat(self.global_steps, "done")

    def _fetch_one_gen_batch(self) -> TensorDict:
        config = cast(Any, self).config.data
        size = config.get("gen_batch_size", None) or config.train_batch_size
        numbers = [next(self._numbers) for _ in range(size)]
        uids = np.array([f"prompt{number}" for number in numbers], dtype=object)
        columns: dict[str, Any] = {"uid": uids, "index": torch.tensor(numbers)}
        return cast(TensorDict, tu.get_tensordict(columns))

    def _watch_for_collapse(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """Nothing, because invented rows have no rewards."""

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], size: int) -> KVBatchMeta:
        trainer = cast(Any, self)
        trainer._heartbeat.beat(self.global_steps, "rollout")
        batch, evicted = trainer.replay_buffer.sample(
            global_steps=self.global_steps, partition_id="train", batch_size=size
        )
        metrics.update(evicted)
        trainer._flow.judged(trainer._expected_rollouts, len(batch.keys), len(batch.keys))
        trainer._heartbeat.beat(self.global_steps, "update")
        slow = self._settings["provoke"] == "slow-consumer" and time.time() >= self._fault_at
        time.sleep(3600.0 if slow else self._settings["update_s"] / trainer.parameter_sync_step)
        return batch


def main(config: DictConfig) -> None:
    """Run the load test for `flow_test.seconds`."""
    import verl_ext.trainer.trainers  # noqa: F401 - registers our trainer classes

    test = config.flow_test
    settings: dict[str, Any] = {**test, "rollouts": config.actor_rollout_ref.rollout.n}
    ray.init(**cast(dict[str, Any], OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)))
    try:
        tq.init(config.transfer_queue)
        kind = get_trainer_cls(config.trainer.v1.trainer_mode)
        trainer: Any = type("LoadTrainer", (LoadMixin, kind), {})(config)
        trainer.set_up(settings)
        trainer.run(test.seconds)
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(cast(DictConfig, OmegaConf.load(sys.argv[1])))
