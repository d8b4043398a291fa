"""`drzero ask`: put a question to the trained agent, and see what it read.

    drzero ask "Who founded the company that built Orrin's bridge?"
    drzero ask                                             # keeps asking until Ctrl-D
    drzero ask iteration=1 "…"                             # an earlier solver; 0 is the model before training
    drzero ask --compare iteration=0 "…"                   # both, side by side
    drzero ask --json "…" | jq .answer                     # one JSON object a question
    drzero ask endpoint=https://api.example.com/v1 api=chat "…"     # another model, on the same index

It takes the settings and the index of the loop in paths.checkpoints. An answer is marked if no
passage contains it. Exit codes: 0 for an answer, 1 if a service failed, 3 if the agent gave none.
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TextIO

from drzero.agent.answer import Answer, Source, progress_lines
from drzero.agent.compose import beside, compose_agent
from drzero.agent.earlier import Exchange
from drzero.agent.running import Agents, running
from drzero.loop.plan import take_option
from drzero.ops.console import has_live_terminal, set_verbose, stdout_apart
from drzero.ops.errors import UserError
from drzero.ops.notices import plain
from drzero.ops.text import did_you_mean

_OVERRIDE = re.compile(r"[+~]*[\w.@/]+=.*", re.DOTALL)
_CODES = {"supported": 0, "unsupported": 0, "failed": 1, "none": 3}
_OPTIONS = ("--compare", "--json")
_SHOWN_SOURCES = 3


def run_ask(arguments: Sequence[str]) -> int:
    """Answer the question, or keep asking. Returns the exit code."""
    compared, words = take_option(arguments, "--compare")
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    questions = [word for word in words if word not in overrides]
    if unknown := next((word for word in questions if re.fullmatch("--?[a-z-]+", word)), None):
        hint = did_you_mean(unknown, _OPTIONS)
        raise UserError(f"no option {unknown}{hint}. Options: {', '.join(_OPTIONS)}")
    if len(questions) > 1:
        raise UserError(f"one question at a time, in quotes: {' '.join(questions)!r}")
    with stdout_apart() if as_json else nullcontext(sys.stdout) as out:
        config = compose_agent("ask", overrides)
        other = None if compared is None else compose_agent("ask", beside(overrides, compared))
        set_verbose(config.verbose)
        with running(config, other) as agents:
            if questions:
                return _answer(agents, questions[0], [], out, as_json)[0]
            return _keep_asking(agents, out, as_json)


def _keep_asking(agents: Agents, out: TextIO, as_json: bool) -> int:
    earlier: list[Exchange] = []
    while True:
        try:
            question = input("? " if sys.stdin.isatty() and not as_json else "").strip()
        except EOFError:
            return 0
        if question:
            _, answer = _answer(agents, question, earlier, out, as_json)
            if answer.text is not None:
                earlier.append((question, answer.text))


def _answer(
    agents: Agents, question: str, earlier: Sequence[Exchange], out: TextIO, as_json: bool
) -> tuple[int, Answer]:
    progress = None if as_json else _shown_progress
    answers = asyncio.run(agents.ask(question, earlier, progress))
    agents.services.check()
    names = [model.shown for _, model in agents.sides]
    if as_json:
        sides = [
            {**answer.to_dict(), "model": name, "index": agents.index}
            for answer, name in zip(answers, names, strict=True)
        ]
        one = sides[0] | ({"compared": sides[1]} if len(sides) > 1 else {})
        print(json.dumps(one, ensure_ascii=False), file=out, flush=True)
    else:
        for answer, name in zip(answers, names, strict=True):
            print(shown(answer, name if len(answers) > 1 else None), file=out, flush=True)
    return _CODES[answers[0].state], answers[0]


def _shown_progress(queries: Sequence[str], found: Sequence[Source] | None) -> None:
    dim, normal = ("\033[2m", "\033[0m") if has_live_terminal() else ("", "")
    lines = progress_lines(queries, found, plain)
    print("\n".join(f"{dim}  {line}{normal}" for line in lines), flush=True)


def shown(answer: Answer, name: str | None = None) -> str:
    """An answer for a terminal, with its sources and without control characters."""
    bold, normal = ("\033[1m", "\033[0m") if has_live_terminal() else ("", "")
    head = f"\n{name}:" if name else ""
    if answer.state == "failed":
        return f"{head}\nThe question failed: {plain(str(answer.attempt.failure))}"
    lines = [head, f"{bold}{plain(answer.text)}{normal}" if answer.text else "", answer.note]
    evidence = [source for source in answer.sources if source.evidence]
    for number, source in enumerate((evidence or answer.sources)[:_SHOWN_SOURCES], 1):
        place = f" ({plain(source.id)})" if source.id else ""
        lines.append(f"  [{number}] {plain(source.title or 'untitled')}{place}")
        lines += [f"      {plain(source.evidence)}"] if source.evidence else []
    if answer.state == "unsupported" and not answer.sources:
        lines.append("  It did not search.")
    return "\n".join(line for line in lines if line)
