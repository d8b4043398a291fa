"""Our BFCL scorers against the package's own, on every ground truth and on corrupted calls.

    python3 -m venv reference && uv pip install --python reference/bin/python bfcl-eval==2026.3.23 soundfile
    python -m bench.bfcl_scorer --reference reference/bin/python --corrupted 200 --seed 0

Ground truths become calls as a model writes them: JSON arguments, once with the first right value and once
with the last. A corrupted case has one random change, which may leave it right. The package judges in its own
environment (`bench/bfcl_reference.py`).
"""

import argparse
import collections
import copy
import inspect
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environments.bfcl import multi_turn, single_turn
from environments.bfcl.multi_turn import MultiTurn, MultiTurnEpisode
from environments.bfcl.replay import literal_call
from environments.bfcl.schema import language_of
from environments.bfcl.single_turn import SingleTurn, SingleTurnEpisode
from environments.bfcl.source import Task, tasks
from environments.call import Call, parse_calls
from environments.conversation import Turn

Case = dict[str, Any]
SINGLE = (*single_turn.TRAINED, *single_turn.HELD_OUT)
SEVERAL = multi_turn.HELD_OUT


def main() -> None:
    """Judge all cases twice and print where the verdicts differ."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument(
        "--reference", required=True, type=Path, help="a Python with bfcl-eval and all it needs"
    )
    asked.add_argument("--corrupted", type=int, default=200)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    known = {task["id"]: task for name in (*SINGLE, *SEVERAL) for task in tasks(name)}
    truths = [case for task in known.values() for case in ground_truths(task)]
    draw = random.Random(options.seed)
    changed = []
    for names in (SINGLE, SEVERAL):
        mine = [case for case in truths if case["category"] in names and case["kind"] == "truth"]
        changed += [corrupted(case, draw) for case in draw.choices(mine, k=options.corrupted)]
    cases = [*truths, *changed]
    theirs = reference(cases, options.reference)
    ours = [(verdict_of_several if "turns" in case else verdict)(known[case["id"]], case) for case in cases]
    report(cases, ours, theirs)


def reference(cases: Sequence[Case], python: Path) -> list[bool | str]:
    """The package's verdicts."""
    script = Path(__file__).with_name("bfcl_reference.py")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, script],
            input=json.dumps(cases),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "BFCL_PROJECT_ROOT": folder},
        )
    found: list[bool | str] = json.loads(done.stdout)
    return found


def ground_truths(task: Task) -> list[Case]:
    """The answer's calls, twice for one turn whose arguments have several right values."""
    about = {"id": task["id"], "category": task["category"], "kind": "truth"}
    if "involved_classes" in task:
        return [
            about | {"turns": [[_by_name(task, call) for call in calls] for calls in task["ground_truth"]]}
        ]
    if task["ground_truth"] is None:
        fitting = [] if "irrelevance" in task["category"] else task["function"][:1]
        return [about | {"calls": [{function["name"]: {}} for function in fitting]}]
    first, last = (_single_calls(task, which) for which in (0, -1))
    return [about | {"calls": first}, *([about | {"kind": "last", "calls": last}] if last != first else [])]


def _by_name(task: Task, text: str) -> dict[str, Any]:
    """A right call of a conversation as a model writes it: every argument by name, as JSON has it."""
    name, positional, named = literal_call(text)
    episode = MultiTurnEpisode(MultiTurn().row(task).data) if positional else None
    if episode is not None:
        method = episode._replay._model._methods[name][1]
        named = dict(inspect.signature(method).bind(*positional, **named).arguments)
    return {name: json.loads(json.dumps(named))}


def _single_calls(task: Task, which: int) -> list[dict[str, Any]]:
    documents = {one["name"]: one["parameters"]["properties"] for one in task["function"]}
    calls = []
    for answer in task["ground_truth"]:
        ((name, arguments),) = answer.items()
        made = {}
        for argument, right in arguments.items():
            allowed = [one for one in right if one != ""]
            if not allowed or (which == -1 and "" in right):
                continue
            # An answer of the data has an argument that its function lacks: no call is right there.
            document = documents[name].get(argument, {"type": "any"})
            made[argument] = _written(_chosen(allowed[which], which), document, task["category"])
        calls.append({name: made})
    return calls


def _chosen(value: Any, which: int) -> Any:
    """A right value with one of the values that each of its entries may have."""
    if isinstance(value, list):
        return [_chosen(one, which) for one in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for name, right in value.items():
        allowed = [one for one in right if one != ""] if isinstance(right, list) else [right]
        if allowed and not (which == -1 and isinstance(right, list) and "" in right):
            made[name] = allowed[which]
    return made


def _written(value: Any, document: dict[str, Any], category: str) -> Any:
    """A value as a model writes it: as it is, or in the syntax of the task's language."""
    language, kind = language_of(category), document["type"]
    if language == "Python" or isinstance(value, str):
        return value
    inner = document.get("items", {}).get("type", "any")
    if isinstance(value, bool):
        return json.dumps(value)
    if language == "JavaScript":
        return f"{value}n" if kind == "Bigint" else json.dumps(value)
    if isinstance(value, dict):
        puts = " ".join(f"put({json.dumps(name)}, {json.dumps(one)});" for name, one in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    if isinstance(value, list):
        texts = [_written(one, {"type": inner}, category) for one in value]
        if kind == "Array":
            return f"new {inner}[]{{{', '.join(texts)}}}"
        quoted = [json.dumps(one) if inner in ("String", "char") else one for one in texts]
        return f"new ArrayList<{inner}>(Arrays.asList({', '.join(quoted)}))"
    return f"{value}{ {'long': 'L', 'float': 'f'}.get(kind, '') }"


def corrupted(case: Case, draw: random.Random) -> Case:
    """The case with one change."""
    kind, change = draw.choice(CHANGES)
    changed = copy.deepcopy(case) | {"kind": kind}
    if "turns" in changed:
        turns = [index for index, calls in enumerate(changed["turns"]) if calls]
        change(changed["turns"][draw.choice(turns)], draw)
    else:
        change(changed["calls"], draw)
    return changed


def _some_call(calls: list[Any], draw: random.Random) -> tuple[str, dict[str, Any]] | None:
    if not calls:
        calls.append({"made_up": {"of": 1}})
        return None
    ((name, arguments),) = draw.choice(calls).items()
    return name, arguments


def _drop_call(calls: list[Any], draw: random.Random) -> None:
    if _some_call(calls, draw):
        del calls[draw.randrange(len(calls))]


def _repeat_call(calls: list[Any], draw: random.Random) -> None:
    if _some_call(calls, draw):
        calls.append(copy.deepcopy(draw.choice(calls)))


def _shuffle_calls(calls: list[Any], draw: random.Random) -> None:
    _some_call(calls, draw)
    draw.shuffle(calls)


def _other_tool(calls: list[Any], draw: random.Random) -> None:
    if _some_call(calls, draw):
        index = draw.randrange(len(calls))
        ((name, arguments),) = calls[index].items()
        calls[index] = {f"{name}_all": arguments}


def _add_argument(calls: list[Any], draw: random.Random) -> None:
    if found := _some_call(calls, draw):
        found[1]["verbose"] = draw.choice([True, "yes", 1])


def _drop_argument(calls: list[Any], draw: random.Random) -> None:
    if (found := _some_call(calls, draw)) and found[1]:
        del found[1][draw.choice(list(found[1]))]


def _replace(values: Callable[[Any, random.Random], Any]) -> Callable[[list[Any], random.Random], None]:
    def change(calls: list[Any], draw: random.Random) -> None:
        if (found := _some_call(calls, draw)) and found[1]:
            argument = draw.choice(list(found[1]))
            found[1][argument] = values(found[1][argument], draw)

    return change


def _other_type(value: Any, draw: random.Random) -> Any:
    every = [
        None,
        True,
        1,
        0,
        -2.5,
        "",
        "a text",
        [],
        [value],
        {},
        {"value": value},
        [[1]],
        str(value),
        10**30,
    ]
    return draw.choice(every)


def _other_value(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + draw.choice([1, -1, 0.5, 1e-9])
    if isinstance(value, str):
        return draw.choice([value + "x", value[:-1], value[::-1], value * 2])
    if isinstance(value, list):
        return draw.choice([value[::-1], value[1:], value * 2])
    return {}


def _light_change(value: Any, draw: random.Random) -> Any:
    """A change after which the value is often still right."""
    if isinstance(value, str):
        return draw.choice([value.upper(), value.replace(" ", ""), f" {value}. ", value.replace("'", '"')])
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list):
        return [_light_change(one, draw) for one in value]
    return value


CHANGES: list[tuple[str, Callable[[list[Any], random.Random], None]]] = [
    ("a call dropped", _drop_call),
    ("a call twice", _repeat_call),
    ("another order", _shuffle_calls),
    ("an undeclared tool", _other_tool),
    ("an argument more", _add_argument),
    ("an argument dropped", _drop_argument),
    ("another type", _replace(_other_type)),
    ("another value", _replace(_other_value)),
    ("another spelling", _replace(_light_change)),
]


def _as_turn(calls: Sequence[dict[str, Any]], tools: Sequence[Any]) -> Turn:
    """The calls as the text of a model's turn, parsed as in a rollout."""
    written = [{"name": name, "arguments": arguments} for call in calls for name, arguments in call.items()]
    text = "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in written)
    parsed: tuple[Call, ...] = parse_calls(text, tools)
    return Turn(text, parsed)


def verdict(task: Task, case: Case) -> bool:
    """Ours, for one turn."""
    episode = SingleTurnEpisode(SingleTurn().row(task).data)
    episode.respond(_as_turn(case["calls"], episode.tools()))
    return episode.score().success


def verdict_of_several(task: Task, case: Case) -> bool:
    """Our verdict on a conversation. Each user turn is one turn with calls, and one without."""
    episode = MultiTurn().episode(MultiTurn().row(task))
    for calls in case["turns"]:
        if calls:
            episode.respond(_as_turn(calls, episode.tools()))
        if episode.respond(Turn("")) is None:
            break
    return episode.score().success


def report(cases: Sequence[Case], ours: Sequence[bool], theirs: Sequence[bool | str]) -> None:
    """A table, and every case in which the verdicts differ."""
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case, our, their in zip(cases, ours, theirs, strict=True):
        where = "several turns" if "turns" in case else "one turn"
        truth = case["kind"] in ("truth", "last")
        row = rows[f"{where}, {'ground truth' if truth else 'corrupted'}"]
        row["cases"] += 1
        row["right, ours"] += our
        row["right, package"] += their is True
        row["package raises"] += isinstance(their, str)
        row["differ"] += our != their
    print("| cases | number | right, ours | right, the package's | the package raises | verdicts differ |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['cases']:,} | {row['right, ours']:,} | {row['right, package']:,} | "
            f"{row['package raises']:,} | {row['differ']:,} |"
        )
    print()
    for case, our, their in zip(cases, ours, theirs, strict=True):
        if our != their:
            shown = json.dumps(case.get("calls") or case.get("turns"))
            print(f"- {case['id']}, {case['kind']}: ours {our}, the package's {their}: {shown:.400}")


if __name__ == "__main__":
    main()
