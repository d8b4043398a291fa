"""A run's exported log, read back by Inspect AI itself, which is not installed.

make compat      # DRZERO_COMPAT=1; makes an environment with inspect-ai
"""

import json
import subprocess

import pytest
from made_run import challenger_row, challenger_run, lines
from other_environment import environment, only_by_make_compat

from drzero.runs.report.inspect_log import write_log
from drzero.runs.run_folder import RunFolder

only_by_make_compat("makes an environment with inspect-ai")

READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
(listed,) = list_eval_logs(sys.argv[1])
log = read_eval_log(listed)
first = log.samples[0]
print(json.dumps({
    "status": log.status, "task": log.eval.task, "samples": len(log.samples),
    "mean": log.results.scores[0].metrics["mean"].value,
    "header": read_eval_log(listed, header_only=True).results.total_samples,
    "roles": [message.role for message in first.messages],
    "reasoning": first.messages[0].content[0].reasoning,
    "call": first.messages[0].tool_calls[0].arguments,
    "scores": {name: score.as_float() for name, score in first.scores.items()},
    "errors": [sample.error.message for sample in log.samples if sample.error],
}))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = challenger_run(tmp_path_factory.mktemp("run") / "demo", steps=2, rows=3)
    odd = [challenger_row(2, k=None), challenger_row(2, 1, answer="\ud800\x00\u202e")]
    lines(folder / "dumps" / "step_0002.jsonl", odd)
    log = write_log(RunFolder(folder))
    python = environment(tmp_path_factory, "inspect-ai==0.3.285")
    done = subprocess.run(
        [python, "-c", READ, str(log.parent)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def test_the_log_is_listed_and_has_every_trajectory(read):
    assert (read["status"], read["task"], read["samples"], read["header"]) == ("success", "demo", 5, 5)


def test_messages_calls_and_scores_are_understood(read):
    assert read["roles"] == ["assistant", "tool", "assistant"]
    assert read["reasoning"] == "I will ask." and read["call"] == {"query_list": ["query 0"]}
    assert {"reward", "difficulty", "format", "tool"} <= read["scores"].keys()
    assert read["mean"] > 0


def test_a_row_that_does_not_count_has_its_reason_as_an_error(read):
    assert read["errors"] == ["fewer than 5 solver attempts finished"]
