"""The reference engine as a veRL rollout (veRL 0.9.1): `actor_rollout_ref.rollout.name=reference`."""

from collections.abc import Generator, Sequence
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from drzero.ops.telemetry import progress
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import eos_token_ids, load_model
from verl_ext.engine.sampling import SamplingParams


def _server_name(replica_rank: int) -> str:
    return f"drzero_reference_engine_{replica_rank}"


class ReferenceServer:
    """The Ray actor around one engine, with the methods that veRL calls on a rollout server."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        rollout = omega_conf_to_dataclass(rollout_config)
        hf: HFModelConfig = omega_conf_to_dataclass(model_config)
        options = rollout.engine_kwargs.get("reference", {}) or {}
        torch.set_num_threads(int(options.get("threads", 1)))
        model, tokenizer = load_model(str(hf.local_path), dtype=rollout.dtype, device=get_device_name())
        self._response_length = rollout.response_length
        self._global_steps: int | None = None
        self._engine = ReferenceEngine(
            model,
            eos_token_ids=eos_token_ids(model, tokenizer),
            max_batch_size=rollout.max_num_seqs,
            max_seq_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            prefix_cache_bytes=int(options.get("prefix_cache_mib", 512)) << 20,
            seed=rollout.seed,
        )
        progress().poll("token", lambda: self._engine.stats().tokens_out)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Sample one turn. Log-probs are of the sampled ids under the full, tempered distribution."""
        params = SamplingParams(
            max_tokens=sampling_params.get("max_tokens") or self._response_length,
            temperature=sampling_params.get("temperature", 1.0),
            top_p=sampling_params.get("top_p", 1.0),
            top_k=sampling_params.get("top_k", -1),
            stop_token_ids=tuple(sampling_params.get("stop_token_ids") or ()),
        )
        result = await self._engine.generate(list(prompt_ids), params)
        return TokenOutput(
            token_ids=result.token_ids,
            log_probs=result.log_probs,
            stop_reason="completed" if result.finish_reason == "stop" else result.finish_reason,
            extra_fields={"global_steps": self._global_steps},
        )

    async def update_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Load the actor's weights. `global_steps` marks later samples with their version."""
        await self._engine.update_weights(weights.items())
        self._global_steps = global_steps

    async def wake_up(self, **_: Any) -> None:
        """Do nothing: the small engine never sleeps and has no profiler hook."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = resume_generation = wake_up
    start_profile = stop_profile = wake_up

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Refuse: only partial rollouts abort, and preflight refuses them for this engine."""
        raise NotImplementedError("the reference engine has no partial rollouts: use mode=sync")


class ReferenceReplica(RolloutReplica):
    """One replica of the reference engine: a single process without tensor parallelism."""

    async def launch_servers(self) -> None:
        """Start the server actor next to the training worker and keep its handle."""
        if self.world_size != 1:
            raise ValueError(
                "the reference engine runs on one device: set actor_rollout_ref.rollout."
                "tensor_model_parallel_size=1 and data_parallel_size=1, or use rollout.name=sglang"
            )
        on_gpu = get_device_name() != "cpu"
        server: Any = ray.remote(ReferenceServer).options(
            name=_server_name(self.replica_rank),
            max_concurrency=self.max_concurrency,
            num_gpus=0,
            # The training worker holds the whole device, so the environment gives access to it.
            runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}} if on_gpu else None,
        )
        handle: Any = server.remote(self.config, self.model_config)
        await handle.wake_up.remote()  # answers once the model is loaded
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = _server_name(self.replica_rank)


class ReferenceServerAdapter(BaseRollout):
    """Sends the actor's weights from the training worker to the server."""

    async def release(self, tags: Sequence[str] = ()) -> None:
        """Do nothing: a CPU or a small model leaves room for the engine during the update."""

    resume = release

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send full named tensors to this worker's replica."""
        if wire_format != "named_tensors":
            raise ValueError(f"the reference engine takes full weights, not {wire_format!r}")
        # In the engine's type: with bfloat16, half the bytes go through Ray.
        dtype = getattr(torch, self.config.dtype)
        state = {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in weights}
        # There is one engine per training worker, so the worker's rank is the replica's.
        server = ray.get_actor(_server_name(torch.distributed.get_rank()))
        await server.update_weights.remote(state, kwargs.get("global_steps"))
