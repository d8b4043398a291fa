"""A step's trajectories as a table of Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tracking import Tracking

TABLE = "trajectories"
COLUMNS = ("step", "key", "hop", "score", "counts", "question", "answer", "right", "conversation", "attempts")


def log_trajectories(logger: Tracking, records: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log the lines of a step's dump as a table."""
    import wandb

    table = wandb.Table(columns=list(COLUMNS), data=[_cells(record) for record in records])
    logger.log({TABLE: table}, step=step, backend=["wandb"])


def _cells(record: Mapping[str, Any]) -> list[Any]:
    reward = record["reward"]
    attempts = (
        f"({'right' if attempt['right'] else 'wrong'}) {_text(attempt['trajectory'])}"
        for attempt in record["attempts"]
    )
    return [
        record["step"],
        record["key"],
        record["hop"],
        float(reward["score"]),
        bool(reward.get("valid", True)),
        record["question"],
        reward.get("answer"),
        reward.get("k"),
        _text(record["trajectory"]),
        "\n\n".join(attempts),
    ]


def _text(trajectory: Mapping[str, Any]) -> str:
    parts: list[str | None] = []
    for turn in trajectory["turns"]:
        parts += [turn["text"], *(call["response"] for call in turn["calls"]), turn.get("observation")]
    return "\n".join(filter(None, parts))
