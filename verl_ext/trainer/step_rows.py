"""One record per rollout of a step. veRL holds the rows by column, and only a tag shows a padding row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tracking import Tracking

from drzero.ops.artefacts import announce
from drzero.ops.files import atomic_path
from environments.conversation import Conversation
from verl_ext.method.trajectory import Trajectory

# Attempts have their own place, the filter score may be NaN, and parts are text here.
_NOT_DUMPED = ("attempts", "filter_score", "parts")
SCHEMA = 1  # version of a dump's lines (docs/dumps.md), raised when a field goes or changes its meaning


@dataclass(frozen=True)
class StepRow:
    """One rollout with its reward. A `padding` row must not be counted."""

    key: str  # veRL's `{prompt}_{sample}_{output}`
    padding: bool
    data_source: str
    extra_info: dict[str, Any]
    reward: dict[str, Any]  # the reward function's result, with `score` and `valid`
    trajectory: Trajectory | Conversation  # of a search agent, or of an episode of another environment
    token_drift: int
    targets: tuple[str, ...] = ()  # the answers that a solver's is compared with
    rollout_s: float = 0.0  # without the reward
    agent: dict[str, Any] = field(default_factory=dict)
    """What an agent of one's own did (docs/dumps.md). Empty for any other."""

    @property
    def counts(self) -> bool:
        """Whether the row enters the statistics: a real row whose services did not fail."""
        return not self.padding and bool(self.reward.get("valid", True))

    @property
    def hop(self) -> int:
        """The hop count that the prompt requests, or 0."""
        return int(self.extra_info.get("hop") or 0)

    @property
    def prompt(self) -> str:
        """The id shared by all samples of a prompt."""
        return self.key.rsplit("_", 2)[0]

    @property
    def rollout(self) -> str:
        """The id shared by all branches of a rollout. Only a library's environment has several."""
        return self.key.rsplit("_", 1)[0]

    @property
    def parts(self) -> dict[str, float]:
        """The parts of an environment's reward. A search agent's are separate fields."""
        return dict(json.loads(self.reward.get("parts", "{}")))

    @property
    def own_turns(self) -> Sequence[Any]:
        """Its turns, without the first ones that another row of an agent's episode has."""
        turns = self.trajectory.turns
        return turns[len(turns) - len(self.agent["places"]) :] if self.agent else turns


def read_rows(batch: KVBatchMeta) -> list[StepRow]:
    """The rows of a sampled batch, in its order."""
    columns = ["data_source", "extra_info", "extra_fields", "reward_model"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=columns)
    sources, infos, fields, truths = (list(data[name]) for name in columns)
    return [
        StepRow(
            key=key,
            padding=bool(tag.get("is_padding", False)),
            data_source=str(source),
            extra_info=dict(info),
            reward=dict(extra.get("reward_extra_info", {})),
            trajectory=_conversation(extra),
            token_drift=int(extra["token_drift"]),
            targets=_targets(truth),
            rollout_s=float(extra.get("rollout_s", 0.0)),
            agent=dict(extra.get("agent") or {}),
        )
        for key, tag, source, info, extra, truth in zip(
            batch.keys, batch.tags, sources, infos, fields, truths, strict=True
        )
    ]


def _conversation(extra: Mapping[str, Any]) -> Trajectory | Conversation:
    if "conversation" in extra:
        return Conversation.from_dict(extra["conversation"])
    return Trajectory.from_dict(extra["trajectory"])


def _targets(truth: Mapping[str, Any]) -> tuple[str, ...]:
    target = truth["ground_truth"]["target"]  # a list or an array, or null for a challenger's prompt
    return () if target is None else tuple(map(str, target))


def read_log_probs(batch: KVBatchMeta, rows: Sequence[StepRow]) -> list[list[float]]:
    """The sampler's log-probs of each row's sampled tokens, empty for rows that do not count."""
    columns = ["rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=columns)
    log_probs, masks = (data[name].unbind() for name in columns)
    return [
        values[mask.bool()].tolist() if row.counts else []
        for row, values, mask in zip(rows, log_probs, masks, strict=True)
    ]


def records(rows: Sequence[StepRow], step: int) -> list[dict[str, Any]]:
    """A step's real rows as lines of its dump (docs/dumps.md)."""
    return [
        {
            "schema": SCHEMA,
            "step": step,
            "key": row.key,
            "hop": row.hop,
            **{name: row.extra_info.get(name) for name in ("doc_id", "document")},
            # Challengers write a question, solvers are given one, and an environment's row has an id.
            "question": row.reward.get("question")
            or row.extra_info.get("question", row.extra_info.get("row")),
            "targets": row.targets,
            "trajectory": row.trajectory.to_dict(),
            "token_drift": row.token_drift,
            "rollout_s": round(row.rollout_s, 3),
            "reward": {name: row.reward[name] for name in row.reward if name not in _NOT_DUMPED}
            | ({"parts": row.parts} if "parts" in row.reward else {}),
            "attempts": json.loads(row.reward.get("attempts", "[]")),
            **({"agent": row.agent} if row.agent else {}),
        }
        for row in sorted((row for row in rows if not row.padding), key=lambda row: row.key)
    ]


def dump_rows(rows: Sequence[StepRow], step: int, target: Path) -> None:
    """Write a step's real rows to `target`, one JSON object a line, atomically, and announce it."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records(rows, step))
    with atomic_path(target) as temporary:
        # An environment of your own may say anything: half of a surrogate pair becomes a question mark.
        temporary.write_bytes("".join(lines).encode("utf-8", "replace"))
    announce(target)


WANDB_TABLE = "trajectories"
WANDB_COLUMNS: list[str | int] = ["step", "key", "hop", "score", "counts"]
WANDB_COLUMNS += ["question", "answer", "right", "conversation", "attempts"]


def log_trajectories(logger: Tracking, records: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log the lines of a step's dump as a table of Weights & Biases."""
    import wandb

    table = wandb.Table(columns=WANDB_COLUMNS, data=[_cells(record) for record in records])
    logger.log({WANDB_TABLE: table}, step=step, backend=["wandb"])


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
