"""How many wrong answers earned a challenger of a package corpus its difficulty reward.

    python -m examples.package_corpus
    python -m bench.rewarded outputs/packages/corpus.jsonl outputs/checkpoints/challenger_iter1

Prints a Markdown table and the pairs. The corpus states the right answers. A question that
examples/package_language.yaml has no words for is listed as "unread": judge it by eye.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drzero.ops.records import read_json_lines
from examples.package_language import facts_in, read_question
from verl_ext.method.answers import same_answer

VERDICTS = ("right", "wrong", "unread")
Facts = Mapping[str, Mapping[str, str]]


def truth(question: str, facts: Facts) -> str | None:
    """The answer that the corpus states. Empty if it states none, None for a question in other words."""
    read = read_question(question)
    if read is None or read[0] not in facts:
        return None
    title, names = read
    for name in names:
        title = facts.get(title, {}).get(name, "")
    return title


def judge(question: str, answer: str, facts: Facts) -> str:
    """Return the verdict on a pair."""
    right = truth(question, facts)
    if right is None:
        return "unread"
    return "right" if right and same_answer(answer, [right]) else "wrong"


def rewarded(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The questions of a challenger's run that earned their difficulty."""
    for dump in sorted((folder / "dumps").glob("step_*.jsonl")):
        yield from (one for one in read_json_lines(dump) if one["reward"]["difficulty"] > 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="the corpus, as a JSONL file")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of challenger runs")
    given = parser.parse_args(arguments)
    facts = {line["title"]: facts_in(line["text"]) for line in read_json_lines(given.corpus)}
    lines, table = list[str](), list[str]()
    for run in given.runs:
        counts = Counter[str]()
        for one in rewarded(run):
            reward = one["reward"]
            verdict = judge(reward["question"], reward["answer"], facts)
            counts[verdict] += 1
            shown = f"{reward['question']} → {reward['answer']} ({reward['k']} of {reward['n']})"
            lines.append(f"{run.name} step {one['step']}, {one['hop']} hops, {verdict}: {shown}")
        table.append(
            f"| {run.name} | {sum(counts.values())} | {' | '.join(str(counts[v]) for v in VERDICTS)} |"
        )
    print("\n".join(lines))
    print(f"| run | rewarded | {' | '.join(VERDICTS)} |\n|---|---|---|---|---|")
    print("\n".join(table))


if __name__ == "__main__":
    main()
