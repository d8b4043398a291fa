"""Any environment in veRL's agent loop: ids as sampled, scores by part, and faults that are not zeros."""

import json
import math

import pytest
from agent_loops import EPISODES, Engine, run_loop
from families import family

from environments.conversation import Conversation
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids
from verl_ext.rollout.environment_agent_loop import EnvironmentAgentLoop

SUMS = '''
"""Adds two numbers with a tool. The row chooses the fault."""
import time
from environments.conversation import user_message
from environments.episode import Episode
from environments.row import Row
from environments.score import Score
from environments.taskset import Taskset

ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


class Sum(Episode):
    def __init__(self, a, b, wrong=None):
        self.a, self.b, self.wrong, self.said = a, b, wrong, ""

    def messages(self):
        if self.wrong == "messages":
            return []
        return [user_message(f"{self.a} + {self.b}?")]

    def tools(self):
        return [ADD]

    def call(self, name, arguments):
        if self.wrong == "raise":
            raise RuntimeError("no\\nnumbers \\ud83dtoday")
        if self.wrong == "hang":
            time.sleep(60)
        return str(arguments["a"] + arguments["b"])

    def respond(self, turn):
        self.said = turn.text
        return super().respond(turn)

    def score(self):
        right = self.said.rpartition("</think>")[2].strip() == str(self.a + self.b)
        return {"nan": Score(float("nan"), False), "type": 1.0}.get(
            self.wrong, Score(float(right), right, {"exact": float(right)})
        )


class Sums(Taskset):
    max_turns, timeout_s = 3, 0.5

    def rows(self, split, n, seed):
        return [Row(f"{split}-{i}", {"a": i, "b": seed}) for i in range(n or 5)]

    def episode(self, row):
        return Sum(**row.data)


def load():
    return Sums()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("own") / "environments"
    (place / "sums").mkdir(parents=True)
    (place / "sums" / "__init__.py").write_text(SUMS)
    return place


def roll_out(tokenizer, folder, task, *turns, response_length=300, prompt_length=300):
    """One rollout of veRL's loop."""
    rollout = {"prompt_length": prompt_length, "response_length": response_length, "multi_turn": {}}
    engine = Engine(tokenizer, *turns)
    row = {"extra_info": {"row": "train-1", "task": json.dumps(dict(task))}}
    own = EPISODES | {"environment": "sums", "folder": str(folder), "options": {}, "max_tokens_per_turn": 100}
    (output,) = run_loop(EnvironmentAgentLoop, rollout, engine, tokenizer, row, **own)
    return output, engine


TASK = {"a": 2, "b": 3}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def add(a, b, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def reward(output):
    return dict(output.extra_fields["reward_extra_info"])


def test_a_call_is_answered_and_only_sampled_ids_are_trained_on(tokenizer, folder):
    output, engine = roll_out(tokenizer, folder, TASK, add(2, 3), "5")
    first, second = engine.inputs
    assert first == render_prompt_ids(tokenizer, [{"role": "user", "content": "2 + 3?"}], [ADD])
    assert second == first + engine.outputs[0] + tool_turn_ids(tokenizer, engine.outputs[0], ["5"])
    assert output.prompt_ids + output.response_ids == second + engine.outputs[1]
    trained = [i for i, kept in zip(output.response_ids, output.response_mask, strict=True) if kept]
    assert trained == engine.outputs[0] + engine.outputs[1]
    assert output.response_logprobs is not None and len(output.response_logprobs) == len(output.response_ids)
    assert output.extra_fields["token_drift"] == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3", '{"name": "add", "parameters": {"a": 2, "b": 3}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]'),
        ("qwen3", f"The sum.\n</think>\n\n{add(2, 3)}"),
    ],
)
def test_a_model_of_another_family_plays_with_its_own_turns_and_calls(smollm2_tokenizer, folder, name, call):
    tokenizer = family(smollm2_tokenizer, name)
    said = "So.\n</think>\n\n5" if name == "qwen3" else "5"
    output, engine = roll_out(tokenizer, folder, TASK, call, said)
    first, second = engine.inputs
    assert first == render_prompt_ids(tokenizer, [{"role": "user", "content": "2 + 3?"}], [ADD])
    assert second == first + engine.outputs[0] + tool_turn_ids(tokenizer, engine.outputs[0], ["5"])
    assert (output.reward_score, output.extra_fields["token_drift"]) == (1.0, 0)
    assert output.prompt_ids + output.response_ids == second + engine.outputs[1]


def test_a_family_without_a_role_for_tools_talks_and_is_refused_their_use(smollm2_tokenizer, folder):
    tokenizer = family(smollm2_tokenizer, "gemma")
    output, _ = roll_out(tokenizer, folder, TASK, "5")
    assert output.reward_score == 1.0
    output, _ = roll_out(tokenizer, folder, TASK, add(2, 3), "5")
    assert "roles must alternate" in reward(output)["reason_invalid"] and not reward(output)["valid"]


DRAFT = f"<think>maybe {add(9, 9)}</think>"


@pytest.mark.parametrize("turns", [[f"{DRAFT}5"], [f"{DRAFT}{add(2, 3)}", "<think>So.</think>5"]])
def test_a_call_in_the_thinking_is_not_made(tokenizer, folder, turns):
    output, engine = roll_out(tokenizer, folder, TASK, *turns)
    calls = Conversation.from_dict(output.extra_fields["conversation"]).calls
    assert (len(calls), len(engine.inputs), output.reward_score) == (len(turns) - 1, len(turns), 1.0)


def test_a_call_that_no_record_can_hold_is_answered_with_its_error(tokenizer, folder):
    half = add('"\\ud83d"', 3)
    output, _ = roll_out(tokenizer, folder, TASK, half, "5")
    (call,) = output.extra_fields["conversation"]["turns"][0]["calls"]
    assert call["response"] == f"Error: {call['error']}" and "surrogate" in call["error"]
    assert json.dumps(output.extra_fields, ensure_ascii=False, default=str).encode()
    assert output.reward_score == 1.0


def test_the_score_is_the_environments_with_its_parts(tokenizer, folder):
    output, _ = roll_out(tokenizer, folder, TASK, "5")
    assert (output.reward_score, reward(output)["success"]) == (1.0, True)
    assert json.loads(reward(output)["parts"]) == {"exact": 1.0}
    wrong, _ = roll_out(tokenizer, folder, TASK, "6")
    assert (wrong.reward_score, reward(wrong)["valid"], reward(wrong)["filter_score"]) == (0.0, True, 0.0)


@pytest.mark.parametrize(
    ("call", "undeclared", "response"),
    [
        (add(2, 3, "minus"), 1, "Error: there is no tool 'minus'; the tools are add"),
        (add('"two"', 3), 0, "Error: a: 'two' is not of type 'integer'"),
    ],
    ids=["an unknown tool", "a wrong argument"],
)
def test_an_invalid_call_is_explained_to_the_model_and_counted(tokenizer, folder, call, undeclared, response):
    output, _ = roll_out(tokenizer, folder, TASK, call, add(2, 3), "5")
    counted = {"calls": 2, "undeclared_calls": undeclared, "valid": True, "score": 1.0}
    counted["invalid_calls"] = undeclared  # wrong arguments are only explained
    assert reward(output) | counted == reward(output)
    (made,) = output.extra_fields["conversation"]["turns"][0]["calls"]
    assert made["response"] == response


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("raise", "sums: Episode.respond raised RuntimeError: no numbers ?today"),
        ("hang", "sums: Episode.respond did not return within 0.5 s"),
        ("nan", "sums: Episode.score: a reward is a finite number, not nan (float)"),
        ("type", "sums: Episode.score: a score is of the class Score, not 1.0 (float)"),
        ("messages", "sums: Episode.messages gave list, not a list of messages"),
        ("unknown", "sums: Episode.respond raised"),
    ],
)
def test_an_environments_fault_is_one_line_and_an_invalid_row(tokenizer, folder, wrong, said):
    task = {"a": 2, "b": None if wrong == "unknown" else 3, "wrong": wrong}
    output, _ = roll_out(tokenizer, folder, task, add(2, 3) if wrong != "unknown" else "x", "5")
    fields = reward(output)
    if wrong == "unknown":  # the score adds a number and None
        said = "sums: Episode.score raised TypeError"
    assert fields["reason_invalid"].startswith(said) and "\n" not in fields["reason_invalid"]
    assert not fields["valid"] and math.isnan(fields["filter_score"])
    assert len(output.response_ids) == len(output.response_mask) > 0


def test_a_too_long_first_message_is_a_fault(tokenizer, folder):
    output, engine = roll_out(tokenizer, folder, TASK, "5", prompt_length=10)
    assert "data.max_prompt_length=10" in reward(output)["reason_invalid"]
    assert engine.inputs == [] and sum(output.response_mask) == 0


def test_an_episode_without_room_for_a_turn_ends_and_is_scored(tokenizer, folder):
    length = len(tokenizer.encode(add(2, 3), add_special_tokens=False)) + 3
    output, engine = roll_out(tokenizer, folder, TASK, add(2, 3), "5", response_length=length)
    assert (len(engine.inputs), reward(output)["ended"], reward(output)["valid"]) == (1, "tokens", True)
    assert len(output.response_ids) <= length and output.extra_fields["token_drift"] == 0


def test_the_tasksets_turns_are_a_limit(tokenizer, folder):
    output, engine = roll_out(tokenizer, folder, TASK, *[add(2, 3)] * 4)
    assert (len(engine.inputs), reward(output)["ended"], output.reward_score) == (3, "turns", 0.0)
