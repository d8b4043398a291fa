"""`drzero export-log RUN_DIR`: a run's trajectories in the log format of Inspect AI (version 2, a JSON file).

    drzero export-log outputs/checkpoints/demo                  writes RUN_DIR/inspect/TIME_demo.json
    inspect view --log-dir outputs/checkpoints/demo/inspect     in an environment with inspect-ai

A sample is a trajectory with its messages, its reward and the parts as scores, and the solver's attempts as
metadata. One that does not count has an error instead of scores.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from drzero.ops.files import atomic_path
from drzero.ops.records import Record
from drzero.ops.text import encodable
from drzero.runs.report.figures import Tally
from drzero.runs.report.reasons import explain
from drzero.runs.report.trajectories import Trajectory, read_trajectories
from drzero.runs.run_folder import NotARun, RunFolder, named_run
from environments.turn_text import thinking, turn_parts
from verl_ext.method.trajectory import SearchCall, Turn
from verl_ext.method.trajectory import Trajectory as Conversation

FOLDER = "inspect"


def run_export_log(arguments: Sequence[str]) -> None:
    """Write the log and print its path. Raises NotARun for a folder without a run or without trajectories."""
    print(write_log(named_run(arguments, "export-log")))


def write_log(run: RunFolder) -> Path:
    """Write the log into the run's folder. Raises NotARun without trajectories."""
    tally = Tally()
    for trajectory in read_trajectories(run, []):
        tally.add(trajectory)
    if not tally.trajectories:
        raise NotARun(f"{run.folder} has no trajectory to export: give the folder of a stage that has run")
    began = datetime.fromtimestamp(min((e["time"] for e in (*run.events, *run.beats)), default=0.0), UTC)
    path = run.folder / FOLDER / f"{began:%Y-%m-%dT%H-%M-%S}_{run.name}.json"
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        head = json.dumps(_header(run, tally, began), indent=1)
        file.write(head.removesuffix("\n}") + ',\n "samples": [\n')
        for number, trajectory in enumerate(read_trajectories(run, [])):
            sample = json.dumps(encodable(_sample(trajectory)), ensure_ascii=False)
            file.write((",\n" if number else "") + sample)
        file.write("\n]}\n")
    return path


def _header(run: RunFolder, tally: Tally, began: datetime) -> Record:
    counted = tally.trajectories - tally.invalid
    rewards = tally.means("reward")
    mean = sum(estimate.mean * estimate.n for estimate in rewards) / counted if counted else 0.0
    ended = began + timedelta(seconds=run.seconds or 0.0)
    metrics = {"mean": {"name": "mean", "value": mean}}
    model = (
        run.setting("actor_rollout_ref.model.path") or run.setting("challenger") or run.report.get("model")
    )
    return {
        "version": 2,
        "status": "success" if run.ending.state == "finished" else "started" if run.is_running else "error",
        "eval": {
            "created": began.isoformat(),
            "task": run.name,
            "task_id": run.name,
            "run_id": run.name,
            "dataset": {"name": run.name, "samples": tally.trajectories, "shuffled": False},
            "model": str(model or "unknown"),
            "config": {},
            "metadata": {"stage": run.kind, "command": run.command, "versions": run.versions},
        },
        "plan": {"name": run.kind, "steps": [], "config": {}},
        "results": {
            "total_samples": tally.trajectories,
            "completed_samples": counted,
            "scores": [{"name": "reward", "scorer": "reward", "scored_samples": counted, "metrics": metrics}],
        },
        "stats": {"started_at": began.isoformat(), "completed_at": ended.isoformat(), "model_usage": {}},
    } | ({} if run.ending.state == "finished" or run.is_running else {"error": _error(run.ending.sentence)})


def _sample(trajectory: Trajectory) -> Record:
    messages = list(_messages(trajectory.conversation, trajectory.observations))
    last = [message for message in messages if message["role"] == "assistant"][-1:]
    sample: Record = {
        "id": trajectory.key,
        "epoch": 1,
        "input": trajectory.document or trajectory.question or "",
        "target": list(trajectory.targets) or trajectory.answer or "",
        "messages": messages,
        "output": {
            "model": "policy",
            "choices": [{"message": message, "stop_reason": "stop"} for message in last],
        },
        "metadata": {
            "step": trajectory.step,
            "hop": trajectory.hop,
            "question": trajectory.question,
            "source": f"{trajectory.source}:{trajectory.line}",
            "reasons": list(trajectory.reasons),
            "agent": trajectory.agent,
            "attempts": [
                {
                    "answer": attempt.answer,
                    "right": attempt.right,
                    "failure": attempt.failure,
                    "searches": attempt.searches,
                    "turns": [turn.text for turn in attempt.conversation.turns],
                }
                for attempt in trajectory.attempts
            ],
        },
        "turn_count": len(trajectory.conversation.turns),
    }
    if trajectory.valid and trajectory.score is not None:
        why = {part.name: part.reason for part in explain(trajectory)}
        total: Record = {
            "value": trajectory.score,
            "answer": trajectory.answer,
            "explanation": why.get("reward"),
        }
        parts = {name: {"value": v, "explanation": why.get(name)} for name, v in trajectory.parts.items()}
        sample["scores"] = {"reward": total, **parts}
    else:
        sample["error"] = _error(explain(trajectory)[0].reason)
    return sample


def _messages(conversation: Conversation, observations: Sequence[str | None]) -> Iterator[Record]:
    for place, turn in enumerate(conversation.turns):
        yield _assistant(turn, place)
        for number, call in enumerate(turn.calls):
            yield _tool(call, f"call_{place}_{number}")
        if observations and (said := observations[place]) is not None:
            yield {"role": "user", "content": said}


def _assistant(turn: Turn, place: int) -> Record:
    said = "".join(said for _, said in turn_parts(turn.text))
    content: list[Record] = [{"type": "text", "text": said.strip()}]
    if thought := thinking(turn.text)[0]:
        content.insert(0, {"type": "reasoning", "reasoning": thought})
    calls = [
        {
            "id": f"call_{place}_{number}",
            "function": "search",
            "arguments": {"query_list": list(call.queries or ())},
            "parse_error": None if call.valid else call.error,
        }
        for number, call in enumerate(turn.calls)
    ]
    return {"role": "assistant", "source": "generate", "content": content, "tool_calls": calls or None}


def _tool(call: SearchCall, identity: str) -> Record:
    message: Record = {
        "role": "tool",
        "content": call.response or "",
        "tool_call_id": identity,
        "function": "search",
    }
    if call.failed or not call.valid:
        kind = "unknown" if call.failed else "parsing"
        message["error"] = {"type": kind, "message": call.error or "the call was not answered"}
    return message


def _error(message: str) -> dict[str, Any]:
    return {"message": message, "traceback": "", "traceback_ansi": ""}
