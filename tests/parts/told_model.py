"""A model of episodes that says what it is told to."""

import asyncio

from verl_ext.episodes import Sampled


class Told:
    """Says its lines in turn, and logs the ids of each call."""

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines, self.log = tokenizer, list(lines), []

    async def sample(self, prompt_ids, max_tokens):
        await asyncio.sleep(0.01)
        ids = self.tokenizer.encode(self.lines.pop(0), add_special_tokens=False)
        ids = [*ids, self.tokenizer.convert_tokens_to_ids("<|im_end|>")][:max_tokens]
        self.log.append((list(prompt_ids), ids))
        return Sampled(ids, [-0.5] * len(ids), len(ids) == max_tokens)
