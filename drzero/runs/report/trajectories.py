"""The trajectories of a run as one kind of record: rollouts, synthesized samples, evaluation answers.

Files are read line by line, because they may be larger than memory. docs/dumps.md has their format.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from data.journal import SAMPLES
from data.parquet_io import read_parquet
from data.solver_rows import REJECTS, TRAIN, VAL
from drzero.ops.files import open_regular
from drzero.ops.records import Record, Step, json_lines, shape
from drzero.runs.report.calls import checked
from drzero.runs.run_folder import RunFolder
from drzero.stages.evaluate import ANSWERS
from drzero.stages.examples import CHALLENGED, FAULTS, DumpLine, difficulty, shortcut
from drzero.stages.result import FOUND
from drzero.stages.warm_start_report import CHECKS
from environments.turn_text import after_thinking
from verl_ext.method.answers import extract_last_tag, f1
from verl_ext.method.challenger_reward import extract_pair, integrity_fault
from verl_ext.method.trajectory import Trajectory as Conversation

_FoundLine = shape({"prompt_index": Step, "accepted": bool, "reasons": list[str]})
_REFUSED = shape({"sample": Step, "reasons": list[str]})
RejectLine = shape({"prompt_index": Step, "hop": Step, "doc_id": str | None, "samples": list[_REFUSED]})  # type: ignore[valid-type]
"""A line of `rejects.jsonl` as its readers need it."""
_KEY = re.compile(r"(.+)_(\d{1,9})")
_SHOWN = 200  # characters of a message that stands for a question or an answer
_JOURNALS = {
    "evaluate": (ANSWERS,),
    "synthesize": (SAMPLES,),
    "preview": (SAMPLES,),
    "warm-start": CHECKS[::-1],
}
PARTS = ("difficulty", "format", "think", "tool", "answer_part", "f1")


@dataclass(frozen=True)
class Attempt:
    """One solver attempt at a challenger's question."""

    conversation: Conversation
    answer: str | None
    right: bool
    failure: str | None
    searches: int


@dataclass(frozen=True)
class Trajectory:
    """One conversation, its score, and its place in the run's files."""

    source: str  # the file, relative to the run's folder
    line: int  # its line in that file, from 1
    key: str
    conversation: Conversation
    step: int | None = None
    prompt: int | None = None  # its number, where the run has prompts instead of steps
    hop: int = 0
    score: float | None = None
    valid: bool = True  # False if a service failed. Statistics leave it out.
    reward: Record = field(default_factory=dict)
    question: str | None = None
    answer: str | None = None
    targets: tuple[str, ...] = ()  # accepted answers, if the file has them
    doc_id: str | None = None
    document: str | None = None
    attempts: tuple[Attempt, ...] = ()
    observations: tuple[str | None, ...] = ()
    """The environment's message after each turn, besides its tools' responses."""
    reasons: tuple[str, ...] = ()  # why gates refused the pair, or why the sample was taken
    stage: str = ""  # its run, on a page of several, or which of a warm start's checks
    role: str = ""  # challenger or solver, where a run plays both
    opening: tuple[str, ...] = ()  # an environment's first messages, each after its role
    agent: Record = field(default_factory=dict)  # the model calls of an agent of one's own
    rows: "tuple[Trajectory, ...]" = ()  # the rows of its episode, if it has several

    @property
    def parts(self) -> dict[str, float]:
        """The parts of its reward by name."""
        known = [(name, self.reward.get(name)) for name in PARTS]
        known += dict(self.reward.get("parts") or {}).items()  # of an environment's
        return {name: float(value) for name, value in known if isinstance(value, (int, float))}

    @property
    def begun_again(self) -> list[Record]:
        """The faults after which an agent's episode began again."""
        faults = list(self.agent.get("faults") or ())
        return faults if self.valid else faults[:-1]

    @property
    def place(self) -> tuple[str, int]:
        """Its rollout, and its number among the rows of that, by veRL's key."""
        found = _KEY.fullmatch(self.key)
        return (found[1], int(found[2])) if found else (self.key, 0)

    @property
    def own_turns(self) -> int:
        """How many of its turns, the last ones, no other row of its episode trains."""
        return len(self.agent["places"]) if self.agent else len(self.conversation.turns)

    @property
    def verdict(self) -> str:
        """How hard the question proved, and whether it takes fewer searches than its hops, in words."""
        k, n = self.reward.get("k"), self.reward.get("n")
        solved = [attempt.searches for attempt in self.attempts if attempt.right]
        if self.targets and self.score == 1.0:  # the conversation is a solver's own attempt
            solved.append(len(self.conversation.searches))
        found = [difficulty(k, n) if k is not None and n else None, shortcut(self.hop, solved)]
        return "; ".join(filter(None, found))

    @property
    def failures(self) -> list[str]:
        """What went wrong in it, each in a few words."""
        calls = self.conversation.calls
        faults = self.agent.get("faults") or ()
        found = [] if self.valid else [f"not counted: {_named(faults[-1:]) or 'a service failed'}"]
        found += [f"begun again: {_named(self.begun_again)}"] * bool(self.begun_again)
        if self.valid and self.score is None:
            found.append("not counted: its score is no number")
        if fault := self.reward.get("integrity_fault"):
            found.append(str(fault).replace("_", " "))
        if refused := self.reward.get("refused"):
            found.append(f"not tried: {str(refused).partition(':')[0].replace('_', ' ')}")
        if self.reward.get("undeclared_calls"):
            found.append("a call of no tool")
        if any(call.failed for call in calls):
            found.append("a search failed")
        if any(not call.valid for call in calls):
            found.append("an invalid call")
        if any(turn.truncated for turn in self.conversation.turns):
            found.append("a turn cut off")
        if any(attempt.failure for attempt in self.attempts):
            found.append("an attempt failed")
        return [*found, *sorted({reason.partition(":")[0] for reason in self.reasons if ": " in reason})]


def _named(faults: Sequence[Record]) -> str:
    return ", ".join(fault["name"].replace("_", " ") for fault in faults)


def trajectory_files(run: RunFolder) -> list[Path]:
    """The files with a run's trajectories, in order."""
    if run.kind == "training":
        return sorted((run.folder / "dumps").glob("step_*.jsonl"))
    names = _JOURNALS.get(run.kind, ())
    return [path for name in names if (path := run.folder / name).is_file()]


def read_trajectories(run: RunFolder, unreadable: list[str]) -> Iterator[Trajectory]:
    """Every trajectory in the order of the files. Unreadable lines are added to `unreadable` as FILE:LINE."""
    parse: Callable[..., Trajectory] = _rollout if run.kind in ("training", "preview") else _answer
    if run.kind == "synthesize":
        parse = partial(_sample, _fates(run.folder, unreadable))
    elif run.kind == "preview":
        found = _lines(run.folder / FOUND, run.folder, unreadable, _FoundLine)
        parse = partial(_previewed, {each["prompt_index"]: each for _, each in found})
    elif run.kind == "warm-start":
        parse = _of_check
    for path in trajectory_files(run):
        rows = _of_file(path, run.folder, parse, unreadable)
        yield from _episodes(rows) if run.kind == "training" else rows


def _of_file(
    path: Path, folder: Path, parse: Callable[..., Trajectory], unreadable: list[str]
) -> Iterator[Trajectory]:
    source = path.relative_to(folder).as_posix()
    for line, record in _lines(path, folder, unreadable):
        try:
            if "identity" not in record:  # a journal begins with its conditions
                yield parse(record, source=source, line=line)
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable.append(f"{source}:{line}")


def _episodes(rows: Iterator[Trajectory]) -> Iterator[Trajectory]:
    """The rows of each episode as one trajectory: in a dump they follow one another."""
    episode: list[Trajectory] = []
    for row in rows:
        if episode and (row.place[1] == 0 or row.place[0] != episode[0].place[0]):
            yield _joined(episode)
            episode = []
        episode.append(row)
    if episode:
        yield _joined(episode)


def _joined(rows: Sequence[Trajectory]) -> Trajectory:
    if len(rows) == 1:
        return rows[0]
    ordered = sorted(rows, key=lambda row: row.place[1])
    own = [row.own_turns for row in ordered]
    turns = tuple(row.conversation.turns[-n:] for row, n in zip(ordered, own, strict=True) if n)
    said = tuple(row.observations[-n:] for row, n in zip(ordered, own, strict=True) if n)
    return replace(
        rows[0],
        conversation=Conversation(tuple(chain.from_iterable(turns))),
        observations=tuple(chain.from_iterable(said)),
        rows=tuple(ordered),
    )


def count_lines(path: Path) -> int:
    """The lines of a file, 0 if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        return sum(1 for _ in file)
    return 0


def _lines(path: Path, folder: Path, unreadable: list[str], of: Any = Record) -> Iterator[tuple[int, Record]]:
    source = path.relative_to(folder).as_posix()
    try:
        for line, record in json_lines(path, of):
            if record is None:
                unreadable.append(f"{source}:{line}")
            else:
                yield line, record
    except FileNotFoundError:
        return
    except OSError as error:
        unreadable.append(f"{source} ({error.strerror})")


def _rollout(record: Record, **at: Any) -> Trajectory:
    msgspec.convert(record, DumpLine)
    reward = dict(record["reward"])
    if "integrity" in reward:
        msgspec.convert(reward, CHALLENGED)
    return Trajectory(
        **at,
        key=str(record["key"]),
        **_of_conversation(record),
        step=record["step"],
        hop=record["hop"] or 0,
        score=reward["score"],
        valid=reward.get("valid", True),
        reward=reward,
        **_asked(record, record.get("question"), reward.get("answer")),
        targets=tuple(record.get("targets") or ()),
        doc_id=_text(record.get("doc_id")),
        document=record.get("document"),
        attempts=tuple(map(_attempt, record.get("attempts") or ())),
    )


def _asked(record: Record, question: Any, answer: Any) -> dict[str, Any]:
    """The question and answer. An environment's row has an id and what its episode began and ended with."""
    said = record["trajectory"]
    if opened := [one["content"] for one in said.get("opening", ()) if one["role"] == "user"]:
        last = after_thinking(said["turns"][-1]["text"]) if said["turns"] else ""
        question = f"{question}: {' '.join(opened[-1].split())[:_SHOWN]}"
        answer = extract_last_tag(last, "answer") or " ".join(last.split())[:_SHOWN]
    return {"question": _text(question), "answer": _text(answer)}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)  # the id of an environment's row may be a number


def _conversation(record: Mapping[str, Any]) -> Conversation:
    """The turns. A call of an environment's tool becomes a search call with the call as its query."""
    turns = []
    for turn in record["turns"]:
        calls = [
            call | {"queries": [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"]}
            if "undeclared" in call and call["error"] is None
            else call
            for call in turn["calls"]
        ]
        turns.append(turn | {"calls": calls})
    return Conversation.from_dict({"turns": turns})


def _observations(record: Mapping[str, Any]) -> tuple[str | None, ...]:
    if "opening" not in record:
        return ()
    return tuple(_text(turn.get("observation")) for turn in record["turns"])


def _attempt(record: Mapping[str, Any]) -> Attempt:
    conversation = Conversation.from_dict(record["trajectory"])
    failure = None if record["finished"] else str(record["failure"] or "unfinished")
    answer = _text(record["answer"])
    return Attempt(conversation, answer, bool(record["right"]), failure, int(record["searches"]))


def _answer(record: Record, **at: Any) -> Trajectory:
    answer = _answered(record, **at)
    rows = [
        replace(answer, key=f"{answer.key}_{place}", **_of_conversation(row))
        for place, row in enumerate(record.get("rows", ()))
    ]
    return replace(_joined(rows), key=answer.key) if rows else answer


def _of_conversation(record: Record) -> dict[str, Any]:
    said = record["trajectory"]
    return {
        "conversation": _conversation(said),
        "observations": _observations(said),
        "opening": tuple(f"{each['role']}: {each['content']}" for each in said.get("opening", ())),
        "agent": checked(record["agent"]) if record.get("agent") else {},
    }


def _answered(record: Record, **at: Any) -> Trajectory:
    return Trajectory(
        **at,
        **_of_conversation(record),
        key=str(record["key"]),
        hop=int(record.get("hop") or 0),
        score=float(record["right"]),
        reward={name: record[name] for name in ("f1", "parts", "undeclared_calls") if name in record},
        **_asked(record, record.get("question", record["key"]), record.get("answer")),
        targets=tuple(map(str, record.get("targets", ()))),
        doc_id=str(record["benchmark"]),
    )


def _of_check(record: Record, **at: Any) -> Trajectory:
    """A conversation of a warm start's check. A valid question scores 1, and so does a right answer."""
    role, is_asked = record["role"], record["role"] == "solver"
    judged = record["right" if is_asked else "valid"]
    known = {"key": f"{record['doc_id']}/{record['number']}", "benchmark": record["doc_id"], "right": judged}
    played = replace(_answered(record | known, **at), stage=Path(at["source"]).stem, role=role)
    if is_asked:
        target = str(record["target"])
        return replace(played, targets=(target,), reward={"f1": f1(played.answer, [target])})
    fault = integrity_fault(played.question, played.answer)
    reasons = (FAULTS[fault] if fault else "a valid question",)
    return replace(played, reward={"integrity_fault": fault}, reasons=reasons)


def _previewed(found: Mapping[int, Record], record: Record, **at: Any) -> Trajectory:
    """Scored as in training and judged by the gates."""
    verdict = found.get(int(record["prompt_index"]), {"reasons": (), "accepted": False})
    reasons = tuple(verdict["reasons"]) or ("passed every gate",) * bool(verdict["accepted"])
    return replace(_rollout(record, **at), step=None, prompt=record["step"], reasons=reasons)


@dataclass(frozen=True)
class _Fate:
    hop: int
    doc_id: str | None
    document: str | None = None
    refused: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Reasons by the sample's number. Empty if the prompt gave a pair."""
    taken: str | None = None  # its question in the solver's data


def _fates(folder: Path, unreadable: list[str]) -> dict[int, _Fate]:
    fates = {}
    for name in (TRAIN, VAL):
        if (folder / name).is_file():
            for info in read_parquet(folder / name, ["extra_info"]).column("extra_info").to_pylist():
                fates[int(info["index"])] = _Fate(
                    int(info["hop"]), info["doc_id"], info["document"], taken=info["question"]
                )
    for _, record in _lines(folder / REJECTS, folder, unreadable, RejectLine):
        refused = {sample["sample"]: tuple(sample["reasons"]) for sample in record["samples"]}
        fates[record["prompt_index"]] = _Fate(record["hop"], record["doc_id"], refused=refused)
    return fates


def _sample(fates: Mapping[int, _Fate], record: Record, **at: Any) -> Trajectory:
    """A line of synthesize's journal. The sample taken into the solver's data scores 1."""
    index, number = int(record["prompt_index"]), int(record["sample"])
    conversation = Conversation.from_dict(record["trajectory"])
    question, answer = extract_pair(conversation)
    fate = fates.get(index, _Fate(0, None))
    is_taken = fate.taken is not None and question == fate.taken
    reasons = fate.refused.get(number, ())
    if fate.taken is not None:
        reasons = (
            ("taken into the solver's data",) if is_taken else ("another sample of its prompt was taken",)
        )
    return Trajectory(
        **at,
        key=f"{index}/{number}",
        conversation=conversation,
        prompt=index,
        hop=fate.hop,
        score=float(is_taken),
        question=question,
        answer=answer,
        doc_id=fate.doc_id,
        document=fate.document,
        reasons=reasons,
    )
