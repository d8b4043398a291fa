"""What the gates of previews let through of the lies that bench/teacher.py told.

    python -m bench.lies answers.jsonl outputs/checkpoints/preview

Prints a Markdown table. "No right attempt" counts accepted pairs that no solver attempt agrees with.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from drzero.ops.records import read_json_lines
from drzero.stages.result import FOUND

KINDS = {None: "true", "passage": "false, in a passage", "invented": "false, invented"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("answers", type=Path, help="what the teacher wrote")
    parser.add_argument("previews", type=Path, nargs="+", help="folders of previews with it")
    given = parser.parse_args(arguments)
    told = {
        (line["question"], line["answer"]): line["lie"]
        for line in read_json_lines(given.answers)
        if line["role"] == "challenger"
    }
    rows = defaultdict[tuple[str | None, int], list[Mapping[str, Any]]](list)
    for line in chain.from_iterable(read_json_lines(preview / FOUND) for preview in given.previews):
        rows[told[line["question"], line["answer"]], line["hop"]].append(line)
    print("| answer | hops | questions | refused | accepted | no right attempt |\n|---|---|---|---|---|---|")
    for (lie, hop), lines in sorted(rows.items(), key=lambda row: (list(KINDS).index(row[0][0]), row[0][1])):
        print(f"| {KINDS[lie]} | {hop} | {len(lines)} | {' | '.join(map(str, _fates(lines)))} |")


def _fates(lines: Sequence[Mapping[str, Any]]) -> tuple[str, int, int]:
    gates = Counter(reason.partition(":")[0] for line in lines for reason in line["reasons"])
    accepted = [line for line in lines if line["accepted"]]
    refused = ", ".join(f"{count} {gate}" for gate, count in gates.most_common()) or "0"
    return refused, len(accepted), sum(line["k"] == 0 for line in accepted)


if __name__ == "__main__":
    main()
