"""The order of the data in a run that is never stopped, from veRL's own data loader."""

from collections import Counter
from typing import Any

from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

Batch = Counter[tuple[str, int]]
"""(document, hops) of a step's prompts, with how often each occurs."""


def unbroken_order(config: DictConfig, steps: int) -> list[Batch]:
    """What an undisturbed run draws in its first `steps` steps."""
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None, is_train=True)
    loader = StatefulDataLoader(
        dataset=dataset,
        batch_size=config.data.train_batch_size,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(config.data, dataset),
    )
    drawn: list[list[dict[str, Any]]] = []
    while len(drawn) < steps:
        drawn += [batch["extra_info"] for batch in loader]
    return [Counter((info["doc_id"], info["hop"]) for info in batch) for batch in drawn[:steps]]
