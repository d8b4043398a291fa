"""veRL's agent loops with a scripted engine."""

import asyncio
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

EPISODES = {"max_turns": None, "call_form": "auto"}
"""The environment loop's arguments that are always the same here."""


class Engine:
    """Gives scripted replies, one per call, and records inputs, their limits and outputs."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self._turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
        self._eos = tokenizer.eos_token_id
        self.inputs: list[list[int]] = []
        self.caps: list[int] = []
        self.stops: list[list[int]] = []
        self.outputs: list[list[int]] = []

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        assert sampling_params["temperature"] == 0.7  # the run's
        self.caps.append(sampling_params["max_tokens"])
        self.stops.append(sampling_params.get("stop_token_ids"))
        ids = [*self._turns[len(self.inputs)], self._eos][: self.caps[-1]]
        self.inputs.append(list(prompt_ids))
        self.outputs.append(ids)
        step = {"global_steps": 0}
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields=step, num_preempted=0)


def run_loop(
    kind: type, config: dict[str, Any], engine: Any, tokenizer: Any, row: dict[str, Any], **own: Any
) -> Any:
    """The outputs of one rollout of a row at temperature 0.7. `own` are the loop's own arguments."""

    async def run() -> Any:
        rollout = {"actor_rollout_ref": {"rollout": config}}
        loop = kind(
            trainer_config=DictConfigWrap(OmegaConf.create(rollout)),
            server_manager=engine,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(OmegaConf.create({})),
            hf_model_type="llama",
            **own,
        )
        return await loop.run({"temperature": 0.7}, **row)

    return asyncio.run(run())
