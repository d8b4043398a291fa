"""Verdicts of bfcl-eval's own scorer: runs in an environment that has all that the package depends on.

    BFCL_PROJECT_ROOT=$(mktemp -d) reference/bin/python bench/bfcl_reference.py < cases.json > verdicts.json

`bench/bfcl_scorer.py` starts it. It imports nothing of this project. A verdict is `true`, `false`, or the
exception that the package raised, as text. The project root is where the package makes folders when it is
imported.
"""

import contextlib
import json
import sys

from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.model_handler.utils import convert_to_function_call
from bfcl_eval.utils import (
    is_empty_output,
    is_function_calling_format_output,
    load_dataset_entry,
    load_ground_truth_entry,
)

MODEL = "Salesforce/xLAM-2-3b-fc-r"
"""A model whose function names keep their dots."""


def language(category):
    """The language whose types the checker compares."""
    if "javascript" in category:
        return Language.JAVASCRIPT
    return Language.JAVA if "java" in category else Language.PYTHON


def single(case, entry, truth):
    """As `eval_runner` judges decoded calls of one turn."""
    if truth is None:
        empty = is_empty_output(case["calls"])
        return empty if "irrelevance" in case["category"] else not empty
    if not is_function_calling_format_output(case["calls"]):
        return False
    checked = ast_checker(
        entry["function"], case["calls"], truth, language(case["category"]), case["category"], MODEL
    )
    return checked["valid"]


def several(case, entry, truth, number):
    """As `eval_runner` judges a conversation, each turn one step. A model's name keeps the objects apart."""
    decoded = [[convert_to_function_call(calls)] if calls else [] for calls in case["turns"]]
    checked = multi_turn_checker(decoded, truth, entry, case["category"], f"case_{number}")
    return checked["valid"]


def main():
    """Read cases, write verdicts."""
    cases = json.load(sys.stdin)
    entries, truths = {}, {}
    for category in {case["category"] for case in cases}:
        loaded = load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)
        entries.update((entry["id"], entry) for entry in loaded)
        if "relevance" not in category:
            truths.update((one["id"], one["ground_truth"]) for one in load_ground_truth_entry(category))
    verdicts = []
    with contextlib.redirect_stdout(sys.stderr):
        for number, case in enumerate(cases):
            entry, truth = entries[case["id"]], truths.get(case["id"])
            try:
                if "turns" in case:
                    verdicts.append(several(case, entry, truth, number))
                else:
                    verdicts.append(single(case, entry, truth))
            # Any error of the package is a result.
            except Exception as error:
                verdicts.append(f"{type(error).__name__}: {error}")
    json.dump(verdicts, sys.stdout)


if __name__ == "__main__":
    main()
