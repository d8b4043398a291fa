"""`drzero preflight STAGE overrides… [--all | --json]`: what would go wrong, before you pay for it.

    drzero preflight challenger hardware=8xh100 model=qwen2.5-7b
    drzero preflight evolve loop=demo                    every stage of a loop, and their total cost
    drzero preflight evolve loop=demo --all              with notes, and tables of memory and time
    drzero preflight solver iteration=2 --json           for other programs

Prints errors and warnings, the worst phase of memory, time and cost. The exit code is 2 after an error
(docs/preflight.md).
"""

from collections.abc import Sequence

from drzero.agent.compose import AGENTS, compose_agent
from drzero.loop.preflight import preflight_stage
from drzero.ops.text import did_you_mean
from drzero.preflight.finding import refusal
from drzero.preflight.report import EVERYTHING, as_json, print_reports
from drzero.preflight.run import STAGE_NAMES
from drzero.recipe.compose import compose_stage

_JSON = "--json"


def run_preflight(arguments: Sequence[str]) -> int:
    """Check one stage or all of `evolve`. Returns the exit code. Raises PreflightFailed for no stage."""
    words = [word for word in arguments if word not in (_JSON, EVERYTHING)]
    if not words or words[0] not in STAGE_NAMES:
        why = "preflight checks one stage"
        if words:
            why = f"there is no stage {words[0]!r}{did_you_mean(words[0], STAGE_NAMES)}"
        raise refusal("stage", why, f"choose one of {', '.join(STAGE_NAMES)}")
    compose = compose_agent if words[0] in AGENTS else compose_stage
    reports = preflight_stage(words[0], words[1:], compose)
    if _JSON in arguments:
        print(as_json(reports))
    else:
        print_reports(reports, everything=EVERYTHING in arguments)
    return 2 if any(report.errors for report in reports) else 0
