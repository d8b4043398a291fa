"""From a stall and what was collected about it to one named culprit.

    diagnosis = diagnose(situation, landmarks)
    print(diagnosis.sentence)

Pure functions. The situation is what was collected (`ops.watchdog.collect`), whether the phase or the samples
ran out of patience first. The landmarks are what only the recipe knows: in which function the trainer waits
for a batch, which service answers which call. Rules are tried from the cause that explains most to the one
that explains least; the first that finds evidence decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ops.causes import Cause, find_cause
from ops.flow.snapshot import Snapshot, WaitsOn, far_end, undrained
from ops.flow.workers import OpenCall, Worker, call_point, open_calls
from ops.watchdog.collectives import call, compare, is_in_distributed, place_of
from ops.watchdog.movement import Stall
from ops.watchdog.stacks import Frame, Stack, Thread, minorities

DISK_FULL = "disk full"
OUT_OF_MEMORY = "out of memory"
DEAD = "dead process"
STOPPED = "stopped process"
HUNG_SERVICE = "hung service"
STARVATION = "rollout starvation"
NOT_DRAINING = "consumer not draining"
COUNTS_STOPPED = "counts stopped"
BLOCKED_LOOP = "event loop blocked"
NO_DEADLINE = "tool call without deadline"
DATA_LOADER = "data loader stuck"
UNKNOWN = "unknown"

_FULL_GB = 0.05
_LOOP_SILENT_S = 5.0
_OVERDUE = 1.5
"""Times its own deadline, after which an open call has no deadline that works."""


@dataclass(frozen=True, kw_only=True)
class Landmarks:
    """What only the recipe knows. A place is (function, end of the file's name)."""

    batch_wait: tuple[tuple[str, str], ...] = ()
    """The driver waits there for finished rollouts."""
    data_fetch: tuple[tuple[str, str], ...] = ()
    """A batch of prompts is drawn there, besides torch's own data loader."""
    waits_on: WaitsOn = field(default_factory=dict)
    """Flow point → the points that it waits on; a kind of open call is a point of that name."""
    answered_by: Mapping[str, str] = field(default_factory=dict)
    """Flow point → the component that must move it."""
    tools: frozenset[str] = frozenset()
    """Kinds that are tool calls."""
    driver: str = "trainer"
    """The main command."""
    roles: tuple[tuple[str, str], ...] = ()
    """(pattern of a process title, name of the process with `{component}` filled in); first match wins."""
    ranks: str = r"\brank \d+"
    """Pattern of the titles of training ranks."""
    engines: str = r"(?!)"
    """Pattern of the titles of engines, whose idle processes wait for each other in collectives."""
    causes: tuple[Cause, ...] = ()
    """Causes whose log lines only this recipe writes."""
    start_phases: frozenset[str] = frozenset({"start-up"})
    end_phases: frozenset[str] = frozenset({"done"})

    def role(self, stack: Stack) -> str:
        """The name of a process, its component where no pattern matches its title."""
        for pattern, name in self.roles:
            if re.search(pattern, stack.title):
                return name.format(component=stack.component)
        return stack.component


@dataclass(frozen=True)
class ServiceFact:
    """A service as the supervision knows it: healthy, failing, busy, away, hung, starting, dead."""

    name: str
    state: str
    problem: str | None = None
    silent_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that was collected at a stall."""

    phase: str
    step: int
    stall: Stall
    stacks: Sequence[Stack] = ()
    services: Sequence[ServiceFact] = ()
    workers: Sequence[Worker] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    """First error in the log, by component."""
    flow: Snapshot | None = None
    """Where the samples are; None without a flow monitor."""
    disk_free_gb: float | None = None
    oom_kills: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What has happened, who is at fault, how that is known, and what to do."""

    pattern: str
    culprit: str
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: str = ""


Rule = Callable[[Situation, Landmarks], Diagnosis | None]


def diagnose(situation: Situation, landmarks: Landmarks) -> Diagnosis:
    """The diagnosis; `UNKNOWN` with the suspects when no rule finds its evidence."""
    for rule in _RULES:
        if diagnosis := rule(situation, landmarks):
            return diagnosis
    return _unknown(situation, landmarks)


def _disk_full(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    free = situation.disk_free_gb
    error = _error_of(situation, "disk full")
    if error is None and (free is None or free > _FULL_GB):
        return None
    component, line = error or (landmarks.driver, "")
    evidence = [line] if line else []
    if free is not None:
        evidence.append(f"{free:.3f} GB free where the run writes")
    return Diagnosis(
        DISK_FULL,
        component,
        f"the disk is full, and {component} cannot write",
        tuple(evidence),
        "make room (old runs' folders), then rerun: it resumes at the last checkpoint",
    )


def _out_of_memory(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    error = _error_of(situation, "out of memory")
    if error is None and not situation.oom_kills:
        return None
    component = error[0] if error else landmarks.driver
    evidence = [error[1]] if error else []
    if situation.oom_kills:
        evidence.append(f"the kernel has killed {situation.oom_kills} process(es) for lack of memory")
    return Diagnosis(
        OUT_OF_MEMORY,
        component,
        f"{component} ran out of memory",
        tuple(evidence),
        "smaller micro-batches or shorter responses; on a GPU also a smaller share for the engines",
    )


def _dead(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    for service in situation.services:
        if service.state == "dead":
            error = situation.errors.get(service.name)
            evidence = (f"first error: {error}",) if error else ()
            return Diagnosis(DEAD, service.name, f"{service.name} has ended", evidence, "read its log")
    return None


def _stopped(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    stopped = [stack for stack in situation.stacks if stack.is_stopped]
    if not stopped:
        return None
    first = stopped[0]
    name = landmarks.role(first)
    return Diagnosis(
        STOPPED,
        name,
        f"{name} (pid {first.pid}) is stopped by a signal",
        tuple(map(_stands, stopped)),
        f"kill -CONT {first.pid} resumes it; find out what sent SIGSTOP (a debugger, a job's suspension)",
    )


def _ranks(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    ranks = _group_of_ranks(situation.stacks, landmarks)
    if not ranks:
        return None
    components = {rank.component for rank in ranks}
    errors = [line for name, line in situation.errors.items() if name in components]
    ending, starting = situation.phase in landmarks.end_phases, situation.phase in landmarks.start_phases
    found = compare(ranks, bool(errors), ending, starting)
    if found is None:
        return None
    evidence = [f"{_who(stack, landmarks)}: {place}" for stack, place in found.places]
    evidence += [f"first error in its log: {line}" for line in errors]
    culprit = _join(_who(stack, landmarks) for stack in found.suspects) or "all ranks"
    return Diagnosis(
        found.pattern,
        culprit,
        _about_ranks(found.pattern, culprit),
        tuple(evidence),
        _RANK_ADVICE[found.pattern],
    )


def _group_of_ranks(stacks: Sequence[Stack], landmarks: Landmarks) -> list[Stack]:
    """The processes whose titles say that they are ranks; if there are none, those in torch.distributed.

    Other processes in a collective belong to another group, and are no evidence about these.
    """
    named = [stack for stack in stacks if re.search(landmarks.ranks, stack.title)]
    return named or [
        stack
        for stack in stacks
        if is_in_distributed(stack) and not re.search(landmarks.engines, stack.title)
    ]


_RANK_ADVICE = {
    "clean-up deadlock": "the cause is the error that sent the first rank to its clean-up: fix that one",
    "initialisation deadlock": "one rank is late or never joined: see its log and what it still loads",
    "exception on some ranks": "fix the error: the other ranks only wait for those that raised it",
    "mismatched collectives": "a branch differs between ranks: make the condition the same on all of them",
    "shape mismatch between pipeline stages": (
        "a stage sends another shape than the next expects: check the model's split and the micro-batch"
    ),
    "same-collective time-out": (
        "all ranks agree, so it is the network, a GPU or a slow rank: see the Flight Recorder's dumps in "
        "flight/, NCCL_DEBUG=INFO (debug=hang) and the GPUs' state"
    ),
}


def _about_ranks(pattern: str, culprit: str) -> str:
    return {
        "clean-up deadlock": f"clean-up deadlock: {culprit} cleans up while others wait",
        "initialisation deadlock": f"initialisation deadlock: the others wait for {culprit}",
        "exception on some ranks": f"an exception took {culprit} out; the others wait in a collective",
        "mismatched collectives": f"mismatched collectives: {culprit} is not where the other ranks wait",
        "shape mismatch between pipeline stages": f"pipeline stages wait for each other: {culprit}",
        "same-collective time-out": "all ranks wait in the same collective",
    }[pattern]


def _clean_up(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    if situation.phase not in landmarks.end_phases:
        return None
    for stack in situation.stacks:
        if stack.component != landmarks.driver or place_of(stack).kind != "clean-up":
            continue
        others = [t for t in stack.threads if t.name != "MainThread" and t.frames and not _is_idle_pool(t)]
        evidence = [_stands(stack), *(f"thread {t.name!r}: {_user_frame(t.frames)}" for t in others[:4])]
        name = _who(stack, landmarks)
        return Diagnosis(
            "clean-up deadlock",
            name,
            f"clean-up deadlock: {name} waits in {_user_frame(stack.main)} to end",
            tuple(evidence),
            "the run's work is done and saved; what it waits for is in the evidence",
        )
    return None


def _data_loader(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    for stack in situation.stacks:
        for thread in stack.threads:
            place = next((f for f in thread.frames if _fetches(f, landmarks)), None)
            if place is None or stack.component != landmarks.driver:
                continue
            inside = thread.frames[0]
            return Diagnosis(
                DATA_LOADER,
                f"data loader ({_who(stack, landmarks)})",
                f"the data loader is stuck in {_user_frame(thread.frames)}",
                (f"pid {stack.pid}, thread {thread.name}: {inside}, called by {place}",),
                "check the file system that holds the data, and the dataset's own code",
            )
    return None


def _fetches(frame: Frame, landmarks: Landmarks) -> bool:
    if _is_at(frame, landmarks.data_fetch):
        return True
    loaders = (
        "torch/utils/data/dataloader.py",
        "torch/utils/data/_utils/fetch.py",
        "torchdata/stateful_dataloader/",
    )
    names = {"_next_data", "_try_get_data", "_get_data", "__next__", "fetch"}
    return frame.file.startswith(loaders) and call(frame) in names


def _blocked_loop(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    silent = {worker.pid: max(worker.silent_s, worker.loop_silent_s or 0.0) for worker in situation.workers}
    hung = {service.name for service in situation.services if service.state == "hung"}
    for stack in situation.stacks:
        if silent.get(stack.pid, 0.0) < _LOOP_SILENT_S and stack.component not in hung:
            continue
        for thread in stack.threads:
            if blocker := loop_blocker(thread):
                name = _who(stack, landmarks)
                since = f" for {silent[stack.pid]:.0f} s" if stack.pid in silent else ""
                return Diagnosis(
                    BLOCKED_LOOP,
                    name,
                    f"the event loop of {name} is blocked{since} by {blocker}",
                    (f"pid {stack.pid}, thread {thread.name}: {thread.frames[0]}", f"called by {blocker}"),
                    "a blocking call in a coroutine: await it, or run it in a thread (asyncio.to_thread)",
                )
    return None


def loop_blocker(thread: Thread) -> Frame | None:
    """The innermost call of the coroutine that this thread's event loop runs; None while the loop waits."""
    place = next((i for i, frame in enumerate(thread.frames) if _turns_loop(frame)), None)
    if place is None:
        return None
    above = [frame for frame in thread.frames[:place] if not frame.file.startswith(("asyncio/", "uvloop/"))]
    if not above or (len(above) == 1 and call(above[0]) in ("select", "poll")):
        return None
    return next((frame for frame in above if not _is_standard(frame)), above[-1])


def _turns_loop(frame: Frame) -> bool:
    is_loop = frame.file.startswith(("asyncio/", "uvloop/"))
    return is_loop and call(frame) in ("_run_once", "run_forever", "run_until_complete", "run")


def _no_deadline(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    calls = open_calls(situation.workers)
    overdue = [one for one in calls if one.kind in landmarks.tools and _is_overdue(one, situation)]
    if not overdue:
        return None
    oldest = overdue[0]
    component = landmarks.answered_by.get(oldest.kind, oldest.kind)
    limit = f"its deadline of {oldest.limit_s:g} s has no effect" if oldest.limit_s else "it has no deadline"
    return Diagnosis(
        NO_DEADLINE,
        component,
        f"a {oldest.kind} call to {component} has been open for {oldest.age_s:.0f} s: {limit}",
        tuple(_describe_calls(calls)),
        f"give the call a deadline, and find out why {component} accepts it and does not answer",
    )


def _is_overdue(one: OpenCall, situation: Situation) -> bool:
    if one.limit_s is None:
        return one.age_s > situation.stall.limit_s / 2
    return one.age_s > _OVERDUE * one.limit_s


def _starvation(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    evidence = [
        f"{_who(stack, landmarks)} waits in {place}"
        for stack in situation.stacks
        for thread in stack.threads
        if (place := next((f for f in thread.frames if _is_at(f, landmarks.batch_wait)), None))
    ][:1]
    if situation.flow and (waiting := situation.flow.waiting) and waiting.is_short:
        evidence.append(f"of the samples it waits for, {waiting}")
    if not evidence:
        return None
    calls = open_calls(situation.workers)
    culprit, why = _who_starves(situation, landmarks, calls)
    failed = Counter[str]()
    for worker in situation.workers:
        failed.update(worker.failed)
    evidence += _describe_calls(calls)
    if not calls:
        evidence += [f"{count:g} {kind} calls have failed" for kind, count in failed.items()]
    return Diagnosis(
        STARVATION,
        culprit,
        f"rollout starvation: the trainer waits for a batch because {why}",
        tuple(evidence),
        f"check {culprit}: its log, its stacks and its health in this report",
    )


def _who_starves(situation: Situation, landmarks: Landmarks, calls: Sequence[OpenCall]) -> tuple[str, str]:
    """The culprit, and the reason in words: a service that does not work, else what holds everything up."""
    for state in ("dead", "hung", "starting", "away", "failing", "busy"):
        for service in situation.services:
            if service.state == state:
                what = "works, but its dependency does not answer" if state == "away" else f"is {state}"
                problem = f" ({service.problem})" if service.problem else ""
                return service.name, f"{service.name} {what}{problem}"
    flow, waits_on = situation.flow, landmarks.waits_on
    points = {kind: call_point(situation.workers, kind, 0.0) for kind in {one.kind for one in calls}}
    points.update(flow.points if flow else {})
    starts = [flow.waiting.point] if flow and flow.waiting else list(waits_on)
    end = far_end(points, waits_on, *starts)
    if end and end in landmarks.answered_by:
        point, component = points[end], landmarks.answered_by[end]
        age = f", the oldest for {point.oldest_age_s:.0f} s" if point.oldest_age_s else ""
        return component, f"{component} finishes nothing: {end} holds {point.depth:g}{age}"
    return "rollout workers", "no rollout is under way: its workers died or lost their prompts"


def _hung_service(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    for service in situation.services:
        if service.state == "hung":
            return Diagnosis(
                HUNG_SERVICE,
                service.name,
                f"{service.name} runs but does not work for {service.silent_s:.0f} s: {service.problem}",
                tuple(_stands(stack) for stack in situation.stacks if stack.component == service.name),
                "see where it stands in the stacks",
            )
    return None


def _from_log(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    for component, line in situation.errors.items():
        if cause := find_cause(line, landmarks.causes):
            culprit = cause.culprit or component
            return Diagnosis(cause.name, culprit, f"{cause.name}: {line[:200]}", (line,), cause.advice)
    return None


def _not_draining(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    flow, driver = situation.flow, landmarks.driver
    for name in undrained(flow) if flow else ():
        assert flow is not None
        point = flow.points[name]
        if point.still_s < situation.stall.limit_s / 2:
            continue
        own = [stack for stack in situation.stacks if stack.component == driver and stack.main]
        busy = [stack for stack in own if landmarks.role(stack) != driver] or own
        return Diagnosis(
            NOT_DRAINING,
            driver,
            f"consumer not draining: {driver} has taken nothing for {point.still_s:.0f} s from {name}, "
            f"which holds {point.depth:g}",
            tuple(map(_stands, busy[:6])),
            f"see what {driver} is busy with in phase {situation.phase}",
        )
    return None


def _counts_stopped(situation: Situation, landmarks: Landmarks) -> Diagnosis | None:
    if situation.stall.kind != "no counts":
        return None
    driver = landmarks.driver
    return Diagnosis(
        COUNTS_STOPPED,
        driver,
        f"{situation.stall.text}, though a thread of its own does that",
        tuple(_stands(stack) for stack in situation.stacks if stack.component == driver),
        "it is stopped, or something holds its interpreter: see the stacks",
    )


def _unknown(situation: Situation, landmarks: Landmarks) -> Diagnosis:
    drivers = [stack for stack in situation.stacks if stack.component == landmarks.driver and stack.main]
    suspects = minorities(drivers) or [s for s in drivers if s.main and not _is_waiting(s.main[0])] or drivers
    culprit = _join(_who(stack, landmarks) for stack in suspects[:3]) or landmarks.driver
    evidence = [f"{_who(stack, landmarks)}: {_user_frame(stack.main)}" for stack in suspects[:6]]
    evidence += [f"first error of {name}: {line}" for name, line in situation.errors.items()]
    where = f", in {_user_frame(suspects[0].main)}" if suspects else ""
    return Diagnosis(
        UNKNOWN,
        culprit,
        f"no progress and no known pattern; the suspect is {culprit}{where}",
        tuple(evidence),
        "see the stacks; debug=hang adds C frames and the collectives' log",
    )


_RULES: tuple[Rule, ...] = (
    _disk_full,
    _out_of_memory,
    _dead,
    _stopped,
    _ranks,
    _clean_up,
    _data_loader,
    _blocked_loop,
    _no_deadline,
    _counts_stopped,
    _starvation,
    _hung_service,
    _from_log,
    _not_draining,
)


def _error_of(situation: Situation, cause: str) -> tuple[str, str] | None:
    """The component whose first error has this cause, and the line."""
    for component, line in situation.errors.items():
        found: Cause | None = find_cause(line)
        if found is not None and found.name == cause:
            return component, line
    return None


def _describe_calls(calls: Sequence[OpenCall]) -> list[str]:
    kinds = dict.fromkeys(one.kind for one in calls)
    oldest = {kind: [one for one in calls if one.kind == kind] for kind in kinds}
    return [f"{len(of)} {kind} calls open, the oldest for {of[0].age_s:.0f} s" for kind, of in oldest.items()]


def _is_at(frame: Frame, places: Sequence[tuple[str, str]]) -> bool:
    return any(call(frame) == name and frame.file.endswith(file) for name, file in places)


def _who(stack: Stack, landmarks: Landmarks) -> str:
    if found := re.search(landmarks.ranks, stack.title):
        return found.group()
    return f"{landmarks.role(stack)} (pid {stack.pid})"


def _stands(stack: Stack) -> str:
    where = f"{stack.main[0]}, from {_user_frame(stack.main)}" if stack.main else stack.failure or "no frames"
    return f"pid {stack.pid} of {stack.component} ({stack.title[:60]}): {where}"


def _user_frame(frames: Sequence[Frame]) -> str:
    return (
        str(next((frame for frame in frames if not _is_standard(frame)), frames[0])) if frames else "nowhere"
    )


def _is_standard(frame: Frame) -> bool:
    """Whether it is a call of the standard library's waiting functions, which do not show the caller."""
    return frame.file.split("/")[0] in {
        *("threading.py", "queue.py", "selectors.py", "socket.py", "ssl.py", "subprocess.py", "time.py"),
        *("asyncio", "concurrent", "multiprocessing", "uvloop", "http", "urllib"),
    }


def _is_waiting(frame: Frame) -> bool:
    return call(frame) in {"wait", "select", "poll", "get", "acquire", "main_loop", "accept", "recv", "read"}


def _is_idle_pool(thread: Thread) -> bool:
    """Whether it is a pool or monitor thread that waits for work."""
    idle = ("concurrent/futures/thread.py", "tqdm/_monitor.py", "multiprocessing/")
    return any(frame.file.startswith(idle) for frame in thread.frames[:3])


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
