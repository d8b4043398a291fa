"""Names one culprit of a stall and its evidence. The first rule that applies decides, widest cause first."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from drzero.ops.causes import NO_HOST_MEMORY, Cause, find_cause, first_cause, named
from drzero.ops.flow.checks import ALIKE_ACTION
from drzero.ops.flow.snapshot import Snapshot, WaitsOn, far_end, undrained
from drzero.ops.flow.workers import OpenCall, Worker, ages, call_point, open_calls
from drzero.ops.process.tree import STOPPED
from drzero.ops.services.external import SILENT
from drzero.ops.watchdog.collectives import call, compare, is_in_distributed, position_of
from drzero.ops.watchdog.movement import Stall
from drzero.ops.watchdog.stacks import Frame, Stack, Thread, minorities

HUNG_SERVICE = "hung service"
UNKNOWN = "unknown"
ALIKE = "groups score alike"
GONE = "worker gone"
FINAL = frozenset({GONE, NO_HOST_MEMORY})  # Stalls of a run that has lost a process. It can only stand still.
STARVATION = "rollout starvation"

_LOADER_FILES = (
    "torch/utils/data/dataloader.py",
    "torch/utils/data/_utils/fetch.py",
    "torchdata/stateful_dataloader/",
)
_LOADER_CALLS = {"_next_data", "_try_get_data", "_get_data", "__next__", "fetch"}
_POOL_FILES = ("concurrent/futures/thread.py", "tqdm/_monitor.py", "multiprocessing/")
"""Pool and monitor threads, which wait for work."""
_STANDARD = re.compile(
    r"((threading|queue|selectors|socket|ssl|subprocess|time)\.py|asyncio|concurrent|multiprocessing|uvloop|http"
    r"|urllib)(/|$)"
)
_WAITING_CALLS = {"wait", "select", "poll", "get", "acquire", "main_loop", "accept", "recv", "read"}


@dataclass(frozen=True, kw_only=True)
class Landmarks:
    """Knowledge of the recipe. A place is (function, end of the file's name)."""

    batch_wait: tuple[tuple[str, str], ...] = ()  # the driver waits there for finished rollouts
    data_fetch: tuple[tuple[str, str], ...] = ()  # draws a batch of prompts, besides torch's own data loader
    waits_on: WaitsOn = field(default_factory=dict)
    """Flow point → the points it waits on. A kind of open call is such a point."""
    answered_by: Mapping[str, str] = field(default_factory=dict)
    """Flow point → the component that must move it."""
    tools: frozenset[str] = frozenset()  # kinds of tool calls
    driver: str = "trainer"  # the main command
    roles: tuple[tuple[str, str], ...] = ()
    """(pattern of a process title, name with `{component}` filled in). The first match wins."""
    ranks: str = r"\brank \d+"  # pattern of the titles of training ranks
    engines: str = r"(?!)"  # titles of engines, whose idle processes wait in collectives
    causes: tuple[Cause, ...] = ()  # causes whose log lines only this recipe writes
    lasting: frozenset[str] = frozenset()  # roles whose processes live as long as the run
    start_phases: frozenset[str] = frozenset({"start-up"})
    end_phases: frozenset[str] = frozenset({"done"})

    def role(self, stack: Stack) -> str:
        """Return the name of a process, or its component if no pattern matches."""
        return self.role_of(stack.title).format(component=stack.component) or stack.component

    def role_of(self, title: str) -> str:
        """Return the name for a process title, or an empty string."""
        return next((name for pattern, name in self.roles if re.search(pattern, title)), "")

    def who(self, stack: Stack) -> str:
        """Name a process for a reader: its rank, else its role and pid."""
        there = f" on {stack.node}" if stack.node else ""
        if found := re.search(self.ranks, stack.title):
            return f"{found.group()}{there}"
        return f"{self.role(stack)} (pid {stack.pid}{there})"


@dataclass(frozen=True)
class ServiceFact:
    """A service's state: healthy, failing, busy, away, hung, silent, starting or dead."""

    name: str
    state: str
    problem: str | None = None
    silent_s: float | None = None  # since it last worked, if known
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything collected at a stall."""

    phase: str
    step: int
    stall: Stall
    stacks: Sequence[Stack] = ()
    services: Sequence[ServiceFact] = ()
    workers: Sequence[Worker] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # first error in the log, by component
    flow: Snapshot | None = None  # where the samples are; None without a flow monitor
    disk_free_gb: float | None = None
    killed: str | None = None  # the kernel's word that it killed a process of the run
    others: str = ""  # the largest programs of others
    unseen: Sequence[str] = ()  # what could not be read on other nodes, one line each


@dataclass(frozen=True)
class Diagnosis:
    """What happened, who is at fault, the evidence, and what to do."""

    pattern: str
    culprit: str
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: str = ""


def diagnose(situation: Situation, landmarks: Landmarks) -> Diagnosis:
    """Return the first rule's diagnosis, or `UNKNOWN` with the suspects."""
    rules = (
        _alike,
        _gone,
        _exhausted,
        _dead_or_stopped,
        _ranks,
        _driver,
        _loops_and_calls,
        _starvation,
        _service_log_or_queue,
    )
    found = next(chain.from_iterable(rule(situation, landmarks) for rule in rules), None)
    if found is not None:
        return found
    drivers = [stack for stack in situation.stacks if stack.component == landmarks.driver and stack.main]
    active = [stack for stack in drivers if call(stack.main[0]) not in _WAITING_CALLS]
    suspects = minorities(drivers) or active or drivers
    culprit = ", ".join(dict.fromkeys(map(landmarks.who, suspects[:3]))) or landmarks.driver
    evidence = [f"{landmarks.who(stack)}: {_user_frame(stack.main)}" for stack in suspects[:6]]
    evidence += [f"first error of {name}: {line}" for name, line in situation.errors.items()]
    where = f", in {_user_frame(suspects[0].main)}" if suspects else ""
    return Diagnosis(
        UNKNOWN,
        culprit,
        f"no progress and no known pattern; the suspect is {culprit}{where}",
        tuple(evidence),
        "see the stacks; debug=hang adds C frames and the collectives' log",
    )


def _alike(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    if situation.stall.kind == "alike":
        yield Diagnosis(
            ALIKE,
            "the tasks or the model",
            f"too many groups score alike, and teach nothing: of a batch, {situation.stall.text}",
            (),
            f"{ALIKE_ACTION}. A resume would only repeat it",
        )


def _gone(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    if situation.stall.kind != "gone":
        return
    said = [line for line in (situation.killed, situation.errors.get(landmarks.driver)) if line]
    _, cause = first_cause(said, landmarks.causes) or ("", None)
    yield Diagnosis(
        GONE,
        (cause and cause.culprit) or situation.stall.where,
        situation.stall.text + (f": {named(cause, situation.others)}" if cause else ""),
        tuple(said),
        cause.advice if cause else f"read {landmarks.driver}.log before it ended, then rerun to resume",
    )


def _exhausted(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    free = situation.disk_free_gb
    error = _error_of(situation, "disk full")
    if error or (free is not None and free <= 0.05):
        component, *evidence = error or (landmarks.driver,)
        if free is not None:
            evidence.append(f"{free:.3f} GB free where the run writes")
        yield Diagnosis(
            "disk full",
            component,
            f"the disk is full, and {component} cannot write",
            tuple(evidence),
            "make room (old runs' folders), then rerun: it resumes at the last checkpoint",
        )
    # A kill of another program is no evidence against this run.
    if host := [*filter(None, [situation.killed]), *_error_of(situation, NO_HOST_MEMORY)[1:]]:
        _, cause = first_cause(host) or ("", None)
        assert cause
        yield Diagnosis(
            cause.name,
            str(cause.culprit),
            f"{named(cause, situation.others)}: {host[0][:200]}",
            tuple(host),
            cause.advice,
        )
    if error := _error_of(situation, "out of memory"):
        component, line = error
        yield from _known_cause(component, line)


def _dead_or_stopped(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    for service in situation.services:
        if service.state == "dead":
            error = situation.errors.get(service.name)
            evidence = (f"first error: {error}",) if error else ()
            yield Diagnosis(
                "dead process", service.name, f"{service.name} has ended", evidence, "read its log"
            )
    if stopped := [stack for stack in situation.stacks if stack.state in (STOPPED, "t")]:
        name, pid = landmarks.role(stopped[0]), stopped[0].pid
        yield Diagnosis(
            "stopped process",
            name,
            f"{name} (pid {pid}) is stopped by a signal",
            tuple(map(_stands, stopped)),
            f"kill -CONT {pid} resumes it; find out what sent SIGSTOP (a debugger, a job's suspension)",
        )


_RANKS = {
    "clean-up deadlock": (
        "clean-up deadlock: {} cleans up while others wait",
        "the cause is the error that sent the first rank to its clean-up: fix that one",
    ),
    "initialisation deadlock": (
        "initialisation deadlock: the others wait for {}",
        "one rank is late or never joined: see its log",
    ),
    "exception on some ranks": (
        "an exception took {} out; the others wait in a collective",
        "fix the error: the other ranks only wait for those that raised it",
    ),
    "mismatched collectives": (
        "mismatched collectives: {} is not where the other ranks wait",
        "a branch differs between ranks: make the condition the same on all of them",
    ),
    "shape mismatch between pipeline stages": (
        "pipeline stages wait for each other because a stage sends another shape than the next expects: {}",
        "check the model's split and the micro-batch",
    ),
    "same-collective time-out": (
        "all ranks wait in the same collective",
        "all ranks agree, so suspect the network, a GPU or a slow rank: see the Flight Recorder's dumps in "
        "flight/, NCCL_DEBUG=INFO (debug=hang) and the GPUs' state",
    ),
}  # by pattern, the sentence with `{}` for the culprit, and what to do


def ranks_of(stacks: Sequence[Stack], landmarks: Landmarks) -> list[Stack]:
    """Return the ranks by their titles, else the processes in torch.distributed."""
    # Other processes in a collective belong to another group and say nothing about the ranks.
    return [stack for stack in stacks if re.search(landmarks.ranks, stack.title)] or [
        stack
        for stack in stacks
        if is_in_distributed(stack) and not re.search(landmarks.engines, stack.title)
    ]


def _ranks(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    ranks = ranks_of(situation.stacks, landmarks)
    components = {rank.component for rank in ranks}
    errors = [line for name, line in situation.errors.items() if name in components]
    ending, starting = situation.phase in landmarks.end_phases, situation.phase in landmarks.start_phases
    if found := compare(ranks, bool(errors), ending, starting):
        pattern, suspects = found
        evidence = [f"{landmarks.who(stack)}: {position_of(stack)}" for stack in ranks]
        evidence += [f"first error in its log: {line}" for line in errors]
        culprit = ", ".join(dict.fromkeys(map(landmarks.who, suspects))) or "all ranks"
        sentence, advice = _RANKS[pattern]
        yield Diagnosis(pattern, culprit, sentence.format(culprit), tuple(evidence), advice)


def _driver(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    drivers = [stack for stack in situation.stacks if stack.component == landmarks.driver]
    for stack in drivers if situation.phase in landmarks.end_phases else ():
        if position_of(stack).kind != "clean-up":
            continue
        others = [
            f"thread {thread.name!r}: {_user_frame(thread.frames)}"
            for thread in stack.threads
            if thread.name != "MainThread"
            and thread.frames
            and not any(frame.file.startswith(_POOL_FILES) for frame in thread.frames[:3])
        ]
        name = landmarks.who(stack)
        yield Diagnosis(
            "clean-up deadlock",
            name,
            f"clean-up deadlock: {name} waits in {_user_frame(stack.main)} to end",
            (_stands(stack), *others[:4]),
            "the run's work is done and saved; the evidence shows what it waits for",
        )
    for stack, thread in _threads(drivers):
        for frame in thread.frames:
            is_loader = frame.file.startswith(_LOADER_FILES) and call(frame) in _LOADER_CALLS
            if is_loader or _is_at(frame, landmarks.data_fetch):
                inside = f"pid {stack.pid}, thread {thread.name}: {thread.frames[0]}, called by {frame}"
                yield Diagnosis(
                    "data loader stuck",
                    f"data loader ({landmarks.who(stack)})",
                    f"the data loader is stuck in {_user_frame(thread.frames)}",
                    (inside,),
                    "check the file system that holds the data, and the dataset's own code",
                )


def _loops_and_calls(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    silent = {worker.pid: max(worker.silent_s, worker.loop_silent_s or 0.0) for worker in situation.workers}
    hung = {service.name for service in situation.services if service.state == "hung"}
    for stack, thread in _threads(situation.stacks):
        is_silent = silent.get(stack.pid, 0.0) >= 5 or stack.component in hung
        if is_silent and (blocker := loop_blocker(thread)):
            name = landmarks.who(stack)
            since = f" for {silent[stack.pid]:.0f} s" if stack.pid in silent else ""
            yield Diagnosis(
                "event loop blocked",
                name,
                f"the event loop of {name} is blocked{since} by {blocker}",
                (f"pid {stack.pid}, thread {thread.name}: {thread.frames[0]}", f"called by {blocker}"),
                "a blocking call in a coroutine: await it, or run it in a thread (asyncio.to_thread)",
            )
    calls = open_calls(situation.workers)
    for one in calls:
        # After 1.5 times its own deadline, that deadline has no effect.
        longest_s = situation.stall.limit_s / 2 if one.limit_s is None else 1.5 * one.limit_s
        if one.kind in landmarks.tools and one.age_s > longest_s:
            component = landmarks.answered_by.get(one.kind, one.kind)
            limit = (
                f"its deadline of {one.limit_s:g} s has no effect" if one.limit_s else "it has no deadline"
            )
            yield Diagnosis(
                "tool call without deadline",
                component,
                f"a {one.kind} call to {component} has been open for {one.age_s:.0f} s: {limit}",
                tuple(_describe_calls(calls)),
                f"give the call a deadline, and find out why {component} accepts it without an answer",
            )


def loop_blocker(thread: Thread) -> Frame | None:
    """Return the innermost call of the coroutine that blocks a thread's event loop, if any."""
    loop = ("asyncio/", "uvloop/")
    turns = ("_run_once", "run_forever", "run_until_complete", "run")
    frames = thread.frames
    place = next((i for i, f in enumerate(frames) if f.file.startswith(loop) and call(f) in turns), 0)
    above = [frame for frame in frames[:place] if not frame.file.startswith(loop)]
    if not above or (len(above) == 1 and call(above[0]) in ("select", "poll")):
        return None
    return next((frame for frame in above if not _is_standard(frame)), above[-1])


def _starvation(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    if situation.stall.kind == "no counts":
        yield Diagnosis(
            "counts stopped",
            landmarks.driver,
            f"{situation.stall.text}, although a separate thread writes them",
            tuple(_stands(stack) for stack in situation.stacks if stack.component == landmarks.driver),
            "it is stopped, or something holds its interpreter: see the stacks",
        )
    evidence = [
        f"{landmarks.who(stack)} waits in {place}"
        for stack, thread in _threads(situation.stacks)
        if (place := next((f for f in thread.frames if _is_at(f, landmarks.batch_wait)), None))
    ][:1]
    if situation.flow and (waiting := situation.flow.waiting) and waiting.is_short:
        evidence.append(f"of the samples it waits for, {waiting}")
    if not evidence:
        return
    calls = open_calls(situation.workers)
    culprit, why = _who_starves(situation, landmarks, calls)
    evidence += _describe_calls(calls)
    if not calls:
        failed = Counter[str]()
        for worker in situation.workers:
            failed.update(worker.failed)
        evidence += [f"{count:g} {kind} calls have failed" for kind, count in failed.items()]
    yield Diagnosis(
        STARVATION,
        culprit,
        f"rollout starvation: the trainer waits for a batch because {why}",
        tuple(evidence),
        f"check {culprit}: its log, its stacks and its health in this report",
    )


def _who_starves(situation: Situation, landmarks: Landmarks, calls: Sequence[OpenCall]) -> tuple[str, str]:
    """The culprit and the reason: a broken service, else the point that holds everything up."""
    for state in ("dead", "hung", SILENT, "starting", "away", "failing", "busy"):
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


def _service_log_or_queue(situation: Situation, landmarks: Landmarks) -> Iterator[Diagnosis]:
    for service in situation.services:
        if service.state == SILENT:
            since = "" if service.silent_s is None else f" for {service.silent_s:.0f} s"
            yield Diagnosis(
                "silent service",
                service.name,
                f"{service.name} runs elsewhere and has not answered{since}: {service.problem}",
                (),
                "fix it where it runs; this run neither starts nor stops it",
            )
        if service.state == "hung":
            since = "" if service.silent_s is None else f" for {service.silent_s:.0f} s"
            problem = f": {service.problem}" if service.problem else ""
            yield Diagnosis(
                HUNG_SERVICE,
                service.name,
                f"{service.name} runs but does not work{since}{problem}",
                tuple(_stands(stack) for stack in situation.stacks if stack.component == service.name),
                "see where it stands in the stacks",
            )
    for component, line in situation.errors.items():
        yield from _known_cause(component, line, landmarks.causes)
    flow, driver = situation.flow, landmarks.driver
    for name, point in undrained(flow).items() if flow else ():
        if point.still_s >= situation.stall.limit_s / 2:
            own = [stack for stack in situation.stacks if stack.component == driver and stack.main]
            busy = [stack for stack in own if landmarks.role(stack) != driver] or own
            yield Diagnosis(
                "consumer not draining",
                driver,
                f"consumer not draining: {driver} has taken nothing for {point.still_s:.0f} s from {name}, "
                f"which holds {point.depth:g}",
                tuple(map(_stands, busy[:6])),
                f"see what {driver} is busy with in phase {situation.phase}",
            )


def _known_cause(component: str, line: str, more: Sequence[Cause] = ()) -> Iterator[Diagnosis]:
    if cause := find_cause(line, more):
        culprit = cause.culprit or component
        yield Diagnosis(cause.name, culprit, f"{cause.name}: {line[:200]}", (line,), cause.advice)


def _error_of(situation: Situation, cause: str) -> tuple[str, ...]:
    """The component whose first error has this cause, and the line. Empty without one."""
    for component, line in situation.errors.items():
        if (found := find_cause(line)) and found.name == cause:
            return component, line
    return ()


def _threads(stacks: Sequence[Stack]) -> Iterator[tuple[Stack, Thread]]:
    return ((stack, thread) for stack in stacks for thread in stack.threads)


def _describe_calls(calls: Sequence[OpenCall]) -> list[str]:
    by_kind = ages(calls).items()
    return [f"{len(of)} {kind} calls open, the oldest for {of[0]:.0f} s" for kind, of in by_kind]


def _is_at(frame: Frame, places: Sequence[tuple[str, str]]) -> bool:
    return any(call(frame) == name and frame.file.endswith(file) for name, file in places)


def _stands(stack: Stack) -> str:
    where = f"{stack.main[0]}, from {_user_frame(stack.main)}" if stack.main else stack.failure or "no frames"
    return f"pid {stack.pid} of {stack.component} ({stack.title[:60]}): {where}"


def _user_frame(frames: Sequence[Frame]) -> str:
    if not frames:
        return "nowhere"
    return str(next((frame for frame in frames if not _is_standard(frame)), frames[0]))


def _is_standard(frame: Frame) -> bool:
    """Whether it is a waiting function of the standard library, which does not show the caller."""
    return _STANDARD.match(frame.file) is not None
