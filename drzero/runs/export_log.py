"""`drzero export-log RUN_DIR`: a run's trajectories in the log format of Inspect AI.

    drzero export-log outputs/checkpoints/demo          writes RUN_DIR/inspect/TIME_demo.json
    inspect view --log-dir outputs/checkpoints/demo/inspect     in an environment with inspect-ai

docs/dumps.md says what becomes of each field.
"""

from collections.abc import Sequence

from drzero.runs.report.inspect_log import write_log
from drzero.runs.run_folder import named_run


def run_export_log(arguments: Sequence[str]) -> None:
    """Write the log and print its path; raises NotARun for a folder without a run or without trajectories."""
    print(write_log(named_run(arguments, "export-log")))
