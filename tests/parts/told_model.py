"""A model of episodes that says what it is told to."""

import asyncio
import math

from verl_ext.episodes import Sampled


class Told:
    """Says its lines in turn or raises them, and logs the ids of each call. Every id has its own log-prob."""

    def __init__(self, tokenizer, *lines):
        self.tokenizer, self.lines, self.log, self.log_probs = tokenizer, list(lines), [], []

    async def sample(self, prompt_ids, max_tokens):
        await asyncio.sleep(0)
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        whole = [*self.tokenizer.encode(line, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = whole[:max_tokens]
        log_probs = [-0.1 - math.sqrt(len(self.log_probs) + place) / 7 for place in range(len(ids))]
        self.log.append((list(prompt_ids), ids))
        self.log_probs += log_probs
        return Sampled(ids, log_probs, truncated=ids != whole)

    @property
    def inputs(self):
        return [prompt_ids for prompt_ids, _ in self.log]

    @property
    def outputs(self):
        return [ids for _, ids in self.log]
