"""Questions you ask about a run, answered yes or no from its records. `None` means no record."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from drzero.ops.grouping import by_key
from drzero.ops.notices import ALARM_KIND, CHECKPOINT_KIND, STARTUP_KIND
from drzero.ops.records import Record
from drzero.runs.report.figures import ATTEMPTS, Tally
from drzero.runs.run_folder import RunFolder

EVERY_SAMPLE = "Did every sample reach the update?"
_STACKS = "it is only a pause if the run moved on; logs/stall_001.md has the stacks of that moment"
_NO_DIFFICULTY = (
    "the questions are too easy or too hard for this solver: other hops (hop_ratio), or another model"
)
_AGENT = "filter the trajectories' failures by these names: an opened one has the error and its line"
_NO_STATE = ("cost", "progress", ALARM_KIND, CHECKPOINT_KIND, STARTUP_KIND)


@dataclass(frozen=True)
class RunCheck:
    """One question. `good` is None if the run has no record."""

    question: str
    good: bool | None
    evidence: str
    advice: str = ""  # what to do if it is not good

    @property
    def answer(self) -> str:
        """The answer in words."""
        return "no record" if self.good is None else "yes" if self.good else "no"


@dataclass(frozen=True)
class ComponentState:
    """What became of one component over all starts."""

    name: str
    ready: str
    ended: str
    starts: int
    restarts: int
    good: bool


def component_states(run: RunFolder) -> list[ComponentState]:
    """Whether each component became ready, how it ended, how often it was restarted."""
    told = (event for event in run.events if event["kind"] not in _NO_STATE)
    by = by_key(told, lambda event: str(event["component"]))
    return [_state(name, events, run.is_running) for name, events in by.items() if name != "supervision"]


def _state(name: str, events: list[Record], running: bool) -> ComponentState:
    kinds = Counter(event["kind"] for event in events)
    last = events[-1]
    bad = [event for event in events if event["kind"] in ("crash", "hung", "stall", "end")]
    bad += [event for event in events if event["kind"] == "exit" and event.get("code")]
    is_back = bool(bad) and any(
        event["kind"] == "ready" and event["time"] > bad[-1]["time"] for event in events
    )
    is_left = last["kind"] in ("start", "ready", "restart") and not running
    ended = str(last["text"])
    if is_left:
        ended = "no word of its end: killed with the run"
    elif last["kind"] in ("start", "ready", "restart"):
        ended = "is up"
    # The main command has no health check. If it ended by itself, it had come up.
    is_main = bool(kinds["exit"]) or any("offset" in event for event in events)
    ready = next((str(event["text"]) for event in events if event["kind"] == "ready"), None)
    return ComponentState(
        name,
        ready or ("–" if is_main else "never"),
        ended,
        kinds["start"],
        kinds["restart"],
        good=(not bad or is_back) and not is_left and bool(ready or is_main),
    )


def training_checks(run: RunFolder, tally: Tally) -> list[RunCheck]:
    """The check list of a training run."""
    return [*_flow_checks(run), *_step_checks(run), *_row_checks(run, tally)]


def _flow_checks(run: RunFolder) -> Iterator[RunCheck]:
    counted = [record for record in run.flow if record.get("samples")]
    if not counted:
        yield RunCheck("Do samples flow?", None, "no snapshot of the flow has counts")
        return
    samples = counted[-1]["samples"]
    moving = sum(bool((record.get("rates") or {}).get("produced")) for record in counted)
    yield RunCheck(
        "Do rollouts finish?",
        samples["produced"] > 0,
        f"{samples['produced']:.0f} of {samples['asked']:.0f} requested; "
        f"some did in {moving} of {len(counted)} snapshots",
    )
    filled = [record for record in counted if not record["warmup"]]
    took = next((took for r in filled if (took := r.get("about", {}).get("warmup_s")) is not None), None)
    if took is None and filled:
        took = filled[0]["time"] - run.flow[0]["time"]
    ended = "nothing has been trained on" if took is None else f"complete after {took:.1f} s"
    yield RunCheck("Did the buffer fill and the warm-up end?", bool(filled), ended)
    lost = {name: samples.get(name, 0) for name in ("invalid", "failed", "stale", "lost")}
    shown = ", ".join(f"{name} {count:.0f}" for name, count in lost.items() if count) or "none was dropped"
    if filtered := samples.get("filtered"):
        shown += f"; {filtered:.0f} in groups that scored alike, as algorithm.filter_groups asks"
    yield RunCheck(EVERY_SAMPLE, not any(lost.values()), shown)
    yield from _queue_checks(run, counted, bool(filled))


def _queue_checks(run: RunFolder, counted: list[Record], filled: bool) -> Iterator[RunCheck]:
    longest = max(
        (record for record in counted if record.get("waiting")),
        key=lambda r: r["waiting"]["since_s"],
        default=None,
    )
    if longest:
        waiting = longest["waiting"]
        there = f"{waiting['have']:g} of {waiting['want']:g} there"
        text = f"the longest wait was {waiting['since_s']:.0f} s, {there}"
        yield RunCheck("Did the trainer get its batches?", filled, text)
    symptoms = Counter(
        f"{s['check']} at {s['point']}" for record in run.flow for s in record.get("symptoms") or ()
    )
    text = ", ".join(f"{name} ({count} snapshots)" for name, count in symptoms.most_common(4))
    yield RunCheck(
        "Are the queues free of symptoms?", not symptoms, text or f"none in {len(run.flow)} snapshots"
    )
    errors = {name: p["errors"] for name, p in run.flow[-1]["points"].items() if p.get("errors")}
    text = ", ".join(f"{name} {count:.0f}" for name, count in errors.items())
    yield RunCheck("Are the flow points free of errors?", not errors, text or "none at any point")


def _step_checks(run: RunFolder) -> Iterator[RunCheck]:
    trained = [step for step, metrics in run.steps.items() if "training/global_step" in metrics]
    planned = run.setting("trainer.total_training_steps")
    text = f"{len(trained)} step{'s' * (len(trained) != 1)}" if trained else "no step has metrics"
    yield RunCheck("Did training start?", bool(trained), text)
    if trained and isinstance(planned, int):
        yield RunCheck("Are all steps done?", trained[-1] >= planned, f"step {trained[-1]} of {planned}")
    stalls = [mark for mark in run.marks if mark.kind == "stall"]
    text = "; ".join(mark.text for mark in stalls[:3]) or ("no stall" if run.beats else "no phase has begun")
    yield RunCheck("Did it move all the time?", not stalls if stalls or run.beats else None, text, _STACKS)
    judged = any("drzero/collapse/alarms" in metrics for metrics in run.steps.values())
    alarms = [mark for mark in run.marks if mark.kind == "alarm"]
    text = "; ".join(mark.text for mark in alarms[:3])
    good = not alarms if judged or alarms else None
    none = "none was raised" if judged else "no start was as long as an alarm's window of steps"
    yield RunCheck("Is it free of collapse alarms?", good, text or none)


def _row_checks(run: RunFolder, tally: Tally) -> Iterator[RunCheck]:
    if not tally.trajectories:
        yield RunCheck("Are there trajectories?", False, "no dump has one")
        return
    spoiled = (
        f"{tally.invalid} of {tally.trajectories} are left out: a service failed, or their score is no number"
    )
    yield RunCheck("Does every trajectory count?", not tally.invalid, spoiled)
    if tally.agents:
        named = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in tally.faults.most_common())
        text = f"{named}: each began again, or is left out" if named else f"all {tally.agents} episodes"
        yield RunCheck("Did the agent succeed at each first try?", not named, text, _AGENT)
    key = "drzero/rollout/token_drift_rate"
    if drift := [metrics[key] for metrics in run.steps.values() if key in metrics]:
        yield RunCheck(
            "Are the tokens trained on the tokens sampled?",
            not any(drift),
            f"largest token drift {max(drift):g}",
        )
    searched = [estimate for estimate in tally.shares("searched") if estimate.name != "1 hop"]
    if searched:
        share = sum(e.mean * e.n for e in searched) / sum(e.n for e in searched)
        yield RunCheck(
            "Do multi-hop trajectories search?",
            share > 0.3,
            f"{share:.0%} of them (0.3 is asked for)",
            "read what they answer without a search; a warm start teaches a model to search",
        )
    solved = tally.solved()
    if solved:
        some = sum(row["questions"] for row in solved if row["attempts"] == ATTEMPTS[1])
        total = sum(row["questions"] for row in solved)
        text = f"{some:.0f} of {total:.0f} questions: these earn the difficulty reward"
        yield RunCheck("Do some, not all attempts solve a question?", some > 0, text, _NO_DIFFICULTY)
