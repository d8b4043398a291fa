"""Folders of runs as stages leave them, with rewards by the method's own functions."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drzero.runs.report.figures import Tally
from drzero.runs.report.trajectories import Trajectory as PlayedTrajectory
from drzero.runs.report.trajectories import read_trajectories
from drzero.runs.run_folder import RunFolder
from environments.score import Score
from verl_ext.method.challenger_reward import challenger_reward
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

DOCUMENT = "Porlom Works\nPorlom Works is a maker of paper and has its seat in Vizmam."
PASSAGE = "[1] Vizmam: Vizmam is a town whose mayor is Brurbul Lernin.\n[2] Porlal: Porlal is a small town."
QUESTION = "Who is the mayor of the town that Porlom Works has its seat in?"
STARTED = 1_700_000_000.0


def conversation(question: str, answer: str, searches: int = 1, thinking: str = "I will ask.") -> Trajectory:
    """A trajectory that asks after so many searches, each with a new query."""
    turns = []
    for number in range(searches):
        raw = json.dumps({"name": "search", "arguments": {"query_list": [f"query {number}"]}})
        call = SearchCall(raw, (f"query {number}",), PASSAGE)
        turns.append(Turn(f"<think>{thinking}</think>\n<tool_call>{raw}</tool_call>", (call,)))
    last = f"<think>{thinking}</think>\n<question>{question}</question>\n<answer>{answer}</answer>"
    return Trajectory((*turns, Turn(last)))


def challenger_row(
    step: int,
    number: int = 0,
    *,
    hop: int = 2,
    k: int | None = 2,
    question: str = QUESTION,
    answer: str = "Brurbul Lernin",
    trajectory: Trajectory | None = None,
) -> dict[str, Any]:
    """A line of a challenger's dump. `k` of five attempts gave the answer, None if too few finished."""
    trajectory = trajectory or conversation(question, answer)
    score = asdict(challenger_reward(trajectory, DOCUMENT, hop, n=5, k=k))
    attempts = [
        {
            "answer": answer if place < (k or 0) else "Porlal",
            "finished": True,
            "failure": None,
            "searches": 1,
            "tokens_out": 40,
            "right": place < (k or 0),
            "latency_s": 1.0,
            "trajectory": conversation("", answer, thinking="I look it up.").to_dict(),
        }
        for place in range(5 if score["integrity"] else 0)
    ]
    asked = {"doc_id": "firm-porlom-works", "document": DOCUMENT, "question": question}
    key = f"prompt-{step}-{number}_0_0"
    return _row(step, key, hop, trajectory.to_dict(), score, **asked, attempts=attempts)


def _row(
    step: int, key: str, hop: int, trajectory: Mapping[str, Any], reward: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    about = {"schema": 1, "step": step, "key": key, "hop": hop, "token_drift": 0}
    return {**about, "trajectory": trajectory, "reward": reward, "attempts": [], **more}


def solver_row(step: int, trajectory: Trajectory, target: str = "Brurbul Lernin") -> dict[str, Any]:
    """A line of a solver's dump."""
    reward = asdict(solver_reward(trajectory, [target])) | {"hop": 2}
    asked = {"question": QUESTION, "targets": [target]}
    return _row(step, f"prompt-{step}_0_0", 2, trajectory.to_dict(), reward, **asked)


def episode_row(step: int, number: int = 0, *, success: bool = False) -> dict[str, Any]:
    """A line of a train stage's dump: one turn in an environment without tools, paid in parts."""
    score = Score(0.2 + 0.8 * success, success, {"greens": 0.2, "won": float(success)})
    turn = {"text": "<guess>crane</guess>", "truncated": False, "calls": [], "observation": "no"}
    trajectory = {"opening": [{"role": "user", "content": "Guess."}], "turns": [turn]}
    reward = {"score": score.reward, "valid": True, "success": score.success, "parts": score.parts}
    reward |= {"ended": "turns", "undeclared_calls": 0}
    asked = {"doc_id": None, "document": None, "question": f"row {number}", "targets": []}
    return _row(step, f"row-{step}-{number}_0_0", 0, trajectory, reward, **asked)


def played(step: int, score: float, **more: Any) -> PlayedTrajectory:
    """A trajectory without turns as a report reads it."""
    known = {"source": "f", "line": 1, "key": "k", "conversation": Trajectory(())}
    return PlayedTrajectory(step=step, score=score, **(known | more))


def trajectories(folder: Path) -> list[PlayedTrajectory]:
    """A run's, read from its files."""
    return list(read_trajectories(RunFolder(folder), []))


def added_up(found: Iterable[PlayedTrajectory]) -> Tally:
    tally = Tally()
    for trajectory in found:
        tally.add(trajectory)
    return tally


def tally_of(folder: Path) -> Tally:
    """A run's trajectories added up."""
    return added_up(trajectories(folder))


def lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def event(seconds: float, kind: str, component: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"time": STARTED + seconds, "kind": kind, "component": component, "text": text, **more}


def challenger_run(folder: Path, steps: int = 3, rows: int = 4) -> Path:
    """A finished challenger run with a restart in the middle of step 2 and an alarm at its last step."""
    (folder / "logs").mkdir(parents=True)
    (folder / "resolved.yaml").write_text(
        "# command: /home/me/.venv/bin/drzero challenger run.name=demo\n# versions: verl 0.9.1\n"
        f"method: hrpo\ntrainer:\n  total_training_steps: {steps}\n"
        "actor_rollout_ref:\n  model:\n    path: models/demo-policy\n"
    )
    phases = [
        {"time": STARTED + 100 * step + after, "step": step, "phase": phase}
        for step in range(1, steps + 1)
        for phase, after in (("rollout", 0), ("update", 60))
    ]
    end = STARTED + 100 * (steps + 1)
    lines(folder / "heartbeats.jsonl", [*phases, {"time": end, "step": steps, "phase": "done"}])
    alarm = "collapse alarm [entropy]: 0.010 nats a token (limit 0.05): the policy hardly explores any more"
    events = [
        event(0, "start", "retrieval", "starting"),
        event(20, "ready", "retrieval", "ready after 20.0 s"),
        event(21, "start", "trainer", "starting", offset=0),
        event(250, "restart", "retrieval", "died: killed by SIGKILL; starting again"),
        event(255, "ready", "retrieval", "ready after 5.0 s"),
        event(100 * (steps + 1) - 9, "alarm", "trainer", f"step {steps}: {alarm}", step=steps),
        event(100 * (steps + 1), "exit", "trainer", "ended without an error", code=0),
        event(100 * (steps + 1) + 1, "stopped", "retrieval", "stopped"),
    ]
    lines(folder / "logs" / "events.jsonl", events)
    for step in range(1, steps + 1):
        dump = [challenger_row(step, number, hop=1 + number % 3, k=number % 6) for number in range(rows)]
        lines(folder / "dumps" / f"step_{step:04d}.jsonl", dump)
    metrics = {"drzero/collapse/entropy": 0.3, "drzero/failures/share": 0.0}
    metrics["drzero/rollout/token_drift_rate"] = 0.0
    logged = [
        {"step": step, "data": {**metrics, "training/global_step": step, "timing_s/step": 100.0}}
        for step in range(1, steps + 1)
    ]
    lines(folder / "metrics" / "attempt_001.jsonl", logged)
    usage = [_usage(seconds, name) for seconds in (30, 60) for name in ("retrieval", "host")]
    lines(folder / "samples.jsonl", usage)
    lines(folder / "flow.jsonl", [_snapshot(seconds) for seconds in (30, 130, 230)])
    (folder / "result.json").write_text(json.dumps({"outputs": {}, "tokens": 1234, "figures": {}}))
    return folder


def _usage(seconds: float, component: str) -> dict[str, Any]:
    if component == "host":
        return {"time": STARTED + seconds, "component": "host", "memory_free_mb": 9000, "gpus": []}
    return {"time": STARTED + seconds, "component": component, "cpu_share": 0.5, "rss_mb": 700}


def _snapshot(seconds: float) -> dict[str, Any]:
    names = ("asked", "produced", "accepted", "invalid", "failed", "stale", "filtered", "in_flight", "lost")
    return {
        "time": STARTED + seconds,
        "points": {"buffer": {"depth": 3.0, "errors": 0.0}},
        "samples": dict.fromkeys(names, 0.0) | {"asked": 12.0, "produced": seconds / 20},
        "rates": {"produced": 0.05, "accepted": 0.05, "invalid": 0.0, "stale": 0.0},
        "waiting": {"point": "buffer", "have": 3.0, "want": 4.0, "since_s": 12.0},
        "warmup": seconds < 100,
        "about": {} if seconds < 100 else {"warmup_s": 75.4},
        "symptoms": [],
    }


def _answer_row(number: int, given: str) -> dict[str, Any]:
    """A line of an evaluation. The second of three questions has its own answer."""
    target = ("Vizmam", "Porlal", "Vizmam")[number]
    return {
        "key": f"demo_1hop/{number}",
        "benchmark": "demo_1hop",
        "hop": 1,
        "question": f"Where is <b>it</b>, {number}?",
        "targets": [target],
        "answer": given,
        "right": given == target,
        "f1": float(given == target),
        "trajectory": conversation("", given).to_dict(),
    }


def loop_run(checkpoints: Path) -> Path:
    """A loop of one iteration whose solver has failed, next to its stages' folders."""
    challenger_run(checkpoints / "challenger_iter1")
    for name, right in (("evaluate_iter0", 10), ("evaluate_iter1", 20)):
        em = right / 40
        score = {"n": 40, "em": em, "em_low": em - 0.1, "em_high": em + 0.1, "f1": 0.5}
        report = {"benchmarks": {"demo_1hop": {**score, "searches": 1.0, "failed": 0}}, "averages": {}}
        given = ("Vizmam", "Porlal", "Porlal") if right == 20 else ("Vizmam", "Vizmam", "Vizmam")
        lines(checkpoints / name / "answers.jsonl", [{"identity": {}}, *map(_answer_row, range(3), given)])
        (checkpoints / name / "report.json").write_text(json.dumps(report))
    synthesis = checkpoints / "synthesize_iter1"
    sample = {"prompt_index": 5, "sample": 0, "trajectory": conversation("Who is it?", "her").to_dict()}
    lines(synthesis / "samples.jsonl", [{"identity": {}}, sample])
    refused = {"sample": 0, "question": "Who is it?", "answer": "her"}
    refused["reasons"] = ["evidence: her is in no text"]
    prompt = {"prompt_index": 5, "hop": 2, "doc_id": "x", "reason": "every sample was refused"}
    lines(synthesis / "rejects.jsonl", [prompt | {"samples": [refused]}])
    none = {"judged": 0, "refused": 0, "note": "no file"}
    gates = {"evidence": {"judged": 1, "refused": 1}, "contamination": none}
    per_hop = {"2": {"prompts": 1, "accepted": 0, "rejected": 1}}
    (synthesis / "report.json").write_text(json.dumps({"gates": gates, "per_hop": per_hop}))
    complete = {"state": "complete", "seconds": 60.0, "tokens": 10}
    complete |= {"figures": {"reward": 0.5}, "versions": {"verl": "0.9.1"}}
    names = ("evaluate_iter0", "challenger_iter1", "synthesize_iter1", "evaluate_iter1")
    stages = {name: complete for name in names}
    stages["solver_iter1"] = {"state": "failed", "seconds": 5.0, "error": "drzero solver: retrieval died"}
    (checkpoints / "evolve").mkdir()
    (checkpoints / "evolve" / "manifest.json").write_text(json.dumps({"stages": stages}))
    return checkpoints / "evolve"


def warm_start_run(folder: Path) -> Path:
    """A finished warm start whose model keeps the format and answers more often after training."""
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text(
        "# command: drzero warm-start from=preview\nrun: {name: warm_start}\n"
        "compute: {provider: local, type: null, memory: null}\n"
        "machine: {gpu: null, gpus: 1, nodes: 1, device: cpu}\n"
        "base_model: models/demo-policy\ndocuments: 20\ngates: {evidence: true}\ndemonstrations: [preview]\n"
    )
    counts = {("train", 1): 3, ("train", 2): 2, ("held_out", 2): 1}
    chosen = [(split, hop) for (split, hop), count in counts.items() for _ in range(count)]
    about = {"question": QUESTION, "answer": "Brurbul Lernin", "source": "preview"}
    said = {"trajectory": conversation(QUESTION, "x").to_dict()}
    demonstrations = [
        {"role": role, "hop": hop, **about, "split": split, **said}
        for split, hop in chosen
        for role in ("challenger", "solver")
    ]
    lines(folder / "demonstrations.jsonl", demonstrations)
    reasons = ["balance: more of 1 hops", *(f"hops: {number} turns found passages" for number in range(4))]
    left_out = [about | {"role": "solver", "hop": 2, "answer": None, "reason": reason} for reason in reasons]
    lines(folder / "left_out.jsonl", left_out)
    for when, right in (("before", 1), ("after", 2)):
        played = [_checked(number, is_right=number < right) for number in range(2)]
        lines(folder / f"{when}.jsonl", [{"identity": {}}, *(row for pair in played for row in pair)])
    losses = [{"train/loss": 1.0}, {"val/loss": 0.9}, {"train/loss": 0.5}, {"val/loss": 0.6}]
    logged = [{"step": 1 + place // 2, "data": data} for place, data in enumerate(losses)]
    lines(folder / "metrics" / "attempt_001.jsonl", logged)
    events = [event(0, "start", "model", "starting"), event(9, "stopped", "model")]
    lines(folder / "logs" / "events.jsonl", events)
    (folder / "result.json").write_text(json.dumps({"outputs": {}, "tokens": 12, "figures": {}}))
    return folder


def _checked(number: int, *, is_right: bool) -> list[dict[str, Any]]:
    """Both conversations of a pair of the check. A wrong challenger's question is missing."""
    about = {"hop": 2, "doc_id": f"firm-{number}", "searched": True}
    question, answer = (QUESTION, "Brurbul Lernin") if is_right else (None, "Porlal")
    said = conversation(question or "", answer).to_dict()
    asked = {"question": question, "answer": answer, "valid": is_right}
    given = {"question": QUESTION, "target": "Brurbul Lernin", "answered": True, "right": is_right}
    return [
        {"number": 2 * number, "role": "challenger", **about, **asked, "trajectory": said},
        {"number": 2 * number + 1, "role": "solver", **about, "answer": answer, **given, "trajectory": said},
    ]
