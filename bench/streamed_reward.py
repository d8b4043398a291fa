"""A challenger's step with its reward streamed, against one whose reward waits for the last rollout.

    python -m bench.streamed_reward                      # ten minutes; the table goes into bench/README.md
    python -m bench.streamed_reward --attempts 2 --dry   # another shape, printed only

Both arms are veRL's own. *Streamed*: agent loop workers hand each finished trajectory to a reward worker, as
this recipe does. *Barrier*: no reward workers, then `compute_rm_score` over the batch. All else is as
`hardware=cpu` starts it. Rollouts are greedy, attempts have seeds, and both engines compute in float32, so
both arms play the same conversations, which is checked. Services and weights are fresh before each step, so
no cache has seen the questions.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from bench.gates import README, replace_section
from bench.machine import machine
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.compose import compose_stage, resolve, verl_env, write_resolved
from drzero.stages.demo import prepare_demo
from drzero.stages.services import choose_ports, retrieval_spec, solver_spec

TITLE = "## Streamed reward"
FOLDER = Path(__file__).parent.parent / "outputs" / "bench" / "streamed"
STREAMED, BARRIER = "streamed", "barrier"


@dataclass(frozen=True)
class Step:
    """Rollouts and rewards of one step, with times in seconds from its begin."""

    arm: str
    took: float
    begun: tuple[float, ...]
    """When each trajectory's reward began."""
    tokens: int
    """Sampled by the attempts."""
    solver_cpu_s: float
    rollouts: tuple[tuple[int, ...], ...]
    """Each row's ids, prompt and response."""
    attempts: tuple[dict[str, Any], ...]
    """What each attempt said and was shown."""


class Bench:
    """One Ray with a rollout engine, reward workers, and an agent loop worker for each arm."""

    def __init__(self, config: DictConfig) -> None:
        import ray
        import torch
        from verl.experimental.agent_loop import AgentLoopManager
        from verl.experimental.reward_loop import RewardLoopManager
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        from verl_ext.engine.loading import load_model
        from verl_ext.rollout.reference_rollout import ReferenceReplica

        self.config = config
        ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init), log_to_driver=False)
        actor = config.actor_rollout_ref
        replica = ReferenceReplica(0, actor.rollout, actor.model, gpus_per_node=1)
        asyncio.run(replica.launch_servers())
        self.engine = replica.server_handle
        self.weights = ray.put(load_model(actor.model.path)[0].state_dict())
        client = LLMServerClient(config, get_router_handle({replica.server_address: self.engine}))
        self.rewards = RewardLoopManager(config)
        torch.set_num_threads(1)
        workers = {STREAMED: self.rewards.reward_loop_workers, BARRIER: None}
        self.loops = {arm: AgentLoopManager.create(config, client, None, workers[arm]) for arm in workers}

    def step(self, arm: str, batch: Any) -> Step:
        """One step in an arm, with fresh services and caches."""
        import ray

        with ServiceGroup([retrieval_spec(self.config), solver_spec(self.config)]) as services:
            ray.get(self.engine.update_weights.remote(self.weights, 0))
            _, solver = services.services
            before, begin = solver.cpu_s(), time.time()
            rows = self.loops[arm].generate_sequences(batch)
            if arm == BARRIER:
                # Where the reward's function looks for a trajectory.
                fields = [{"trajectory": each} for each in rows.non_tensor_batch["trajectory"]]
                rows.non_tensor_batch["tool_extra_fields"] = np.array(fields, dtype=object)
                rows = rows.union(self.rewards.compute_rm_score(rows))
            took = time.time() - begin
            return _read(arm, took, begin, rows, solver.cpu_s() - before)


def _read(arm: str, took: float, begin: float, rows: Any, solver_cpu_s: float) -> Step:
    columns = rows.non_tensor_batch
    if not all(columns["valid"]):
        raise SystemExit(f"error: a service failed: {[str(each) for each in columns['reason_invalid']]}")
    masked = zip(rows.batch["input_ids"], rows.batch["attention_mask"].bool(), strict=True)
    return Step(
        arm,
        took,
        tuple(float(each) - begin for each in columns["begun"]),
        int(sum(columns["attempt_tokens"])),
        solver_cpu_s,
        tuple(tuple(ids[mask].tolist()) for ids, mask in masked),
        tuple(attempt["trajectory"] for row in columns["attempts"] for attempt in json.loads(str(row))),
    )


def questions(config: DictConfig) -> Any:
    """The first batch of prompts, as veRL reads them."""
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    dataset = RLHFDataset(config.data.train_files, tokenizer, config.data)
    return DataProto.from_single_dict(collate_fn([dataset[i] for i in range(config.data.train_batch_size)]))


def compose(rows: int, attempts: int) -> DictConfig:
    """A challenger's resolved config of the demo, with greedy rollouts and this bench's reward."""
    config = compose_stage(
        "challenger",
        [
            *("hardware=cpu", "model=demo-policy", "retrieval.embedder=packaged-minilm"),
            *(f"paths.corpus={FOLDER}/corpus", f"run.dir={FOLDER}/run"),
            *(f"data.train_batch_size={rows}", f"solver.attempts={attempts}"),
            *("solver.dtype=float32", "reward.custom_reward_function.path=pkg://bench.seeded_attempts"),
        ],
    )
    config.actor_rollout_ref.rollout.temperature = 0  # greedy: refused as a setting of a run
    choose_ports(config)
    config = resolve(config)
    write_resolved(config)
    return config


def measure(config: DictConfig, rounds: int) -> list[Step]:
    """Both arms in turn, each first in every other round, after a small step of each that does not count."""
    os.environ.update(verl_env(config) | {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"})
    batch, bench = questions(config), Bench(config)
    for arm in (STREAMED, BARRIER):
        bench.step(arm, batch[:1])
    steps = []
    for number in range(rounds):
        for arm in (STREAMED, BARRIER)[:: -1 if number % 2 else 1]:
            steps.append(bench.step(arm, batch))
            print(steps[-1].arm, f"{steps[-1].took:.1f} s", flush=True)
            if steps[-1].rollouts != steps[0].rollouts:
                raise SystemExit(f"error: the rollouts of step {len(steps)} are not those of the first")
    return steps


def table(steps: Sequence[Step]) -> str:
    """A row for each step, in the order in which they were run."""
    columns = (
        "arm",
        "step, s",
        "first reward begins, s",
        "last one, s",
        "solver's CPU, s",
        "attempts' tokens",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for step in steps:
        times = f"{step.took:.1f} | {min(step.begun):.1f} | {max(step.begun):.1f} | {step.solver_cpu_s:.1f}"
        lines.append(f"| {step.arm} | {times} | {step.tokens:,} |")
    return "\n".join(lines)


def verdict(steps: Sequence[Step]) -> str:
    """The ratio with its spread, and the most that streaming could have gained."""
    streamed, barrier = ([step for step in steps if step.arm == arm] for arm in (STREAMED, BARRIER))
    pairs = [waited.took / flowed.took for flowed, waited in zip(streamed, barrier, strict=True)]
    ratio = sum(step.took for step in barrier) / sum(step.took for step in streamed)
    rollouts = statistics.fmean(max(step.begun) for step in barrier)
    rewards = statistics.fmean(step.took for step in barrier) - rollouts
    first = statistics.fmean(min(step.begun) for step in streamed)
    best = (rollouts + rewards) / max(rollouts, first + rewards)
    return (
        f"**With the barrier a step takes {ratio:.2f} times as long** ({min(pairs):.2f} to {max(pairs):.2f} "
        f"by pair): {rollouts:.1f} s of rollouts, then {rewards:.1f} s of attempts. Streamed, the solver has "
        f"its first question after {first:.1f} s. If all else took as long in both arms, the ratio would be "
        f"{best:.2f}: rollouts and attempts, by the longer of the rollouts and of what comes after the first "
        "question."
    )


NOTES = (
    "An attempt is about as long as a rollout, and there are several at each question: with engines of equal "
    "speed the solver is what a step waits for, and streaming hides no more than what is left of the "
    "rollouts after the first question. A ratio of 1.5 needs attempts that take at most twice as long as the "
    "rollouts. On GPUs both engines share each of them and decode larger batches, so nothing follows from "
    "these figures for 8×H100; there it has not been measured."
)


def main() -> None:
    """Measure, print, and write the section into bench/README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, default=8, help="of a step")
    parser.add_argument("--attempts", type=int, default=5, help="at each question")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each arm")
    parser.add_argument("--dry", action="store_true", help="print, and leave bench/README.md as it is")
    args = parser.parse_args()
    prepare_demo([f"paths.corpus={FOLDER}/corpus"])
    steps = measure(compose(args.questions, args.attempts), args.rounds)
    played = [attempt for step in steps for attempt in step.attempts]
    differ = sum(one != other for one, other in zip(played, steps[0].attempts * len(steps), strict=True))
    about = (
        f"`python -m bench.streamed_reward --questions {args.questions} --attempts {args.attempts}`, "
        f"{machine('torch', 'verl', 'ray')}: rollouts and rewards of a challenger's step on the demo, "
        f"{args.questions} questions with {args.attempts} attempts each. The ids of all rollouts are equal "
        f"in every step; of {len(played)} attempts {differ} differ from the first step's. Rollout engine and "
        "solver have a core each, both compute in float32."
    )
    section = "\n\n".join([about, table(steps), verdict(steps), NOTES])
    print(section)
    if not args.dry:
        text = replace_section(README.read_text(encoding="utf-8"), TITLE, section)
        README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
