"""Transformers' side: plain forwards of one sequence at a time, without cache or padding.

No sequence has to be generated to be compared. What the engine sampled is read by one forward: its most
probable id at each position is what Transformers would have chosen after the same ids, so the first position
where the two differ is where greedy sequences part.
"""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel


class Yardstick:
    """One model in Transformers' own attention, and what it makes of token ids."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()

    def log_probs(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """(response, vocabulary) in float32 on the CPU: the log-probabilities at each position of it."""
        ids = torch.tensor([[*prompt, *response]], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(response)).logits
            return logits[0].float().log_softmax(-1).cpu()

    def continue_greedily(self, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
        """The ids that Transformers' own greedy generation adds; nothing of the model's defaults applies."""
        settings = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=stop_ids[0],
        )
        given = torch.tensor([list(ids)], device=self._model.device)
        with torch.inference_mode():
            made = self._model.generate(
                given, attention_mask=torch.ones_like(given), generation_config=settings
            )
        return [int(token) for token in made[0, len(ids) :]]
