"""Agents of one's own against a model that says what it is told to: real clients, real threads, real ids."""

import asyncio
import gc
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import own_agents
import pytest
import uvloop
from anthropic import Anthropic
from openai import AsyncOpenAI, BadRequestError, OpenAI
from told_model import Told

from drzero.players.gateway.player import _Thread
from drzero.players.gateway.server import Gateway, _same
from drzero.players.gateway.session import AgentSession
from drzero.runs.report.calls import call_rows, every_row
from drzero.runs.report.reasons import explain
from drzero.runs.report.trajectories import read_trajectories
from drzero.runs.run_folder import RunFolder
from drzero.stages.evaluate.environment import episode_record
from environments.agent.contract import Agent, Endpoint
from environments.agent.load import load_agent
from environments.agent.taskset import AgentTaskset
from environments.row import Row
from verl_ext.clients.environment_agent import EpisodeAttempt, of_episode
from verl_ext.episodes import EpisodeLimits, play_row
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA
from verl_ext.rollout.environment_agent_loop import reward_fields
from verl_ext.trainer.step_rows import StepRow, dump_rows

LIMITS = EpisodeLimits(prompt_tokens=512, response_tokens=512, tokens_per_turn=128)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["town"]}}\n</tool_call>'
TOOL = SEARCH_TOOL_SCHEMA
PARAMETERS = TOOL["function"]["parameters"]
PARSED = {"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}  # by openai's helper
FOUND = "[1] Vell: a town."


def user(text):
    return {"role": "user", "content": text}


USER, SAID = user("hi"), {"role": "assistant", "content": "hm"}


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"question": f"Where is {n}?"}) + "\n" for n in range(20)))
    return file


@pytest.fixture
def played(tasks, tokenizer):
    """Plays an agent's function. Returns its rows and the model."""

    def play(agent, *lines, **options):
        taskset = AgentTaskset("own_agents:langgraph", data=str(tasks), **{"tries": 1} | options)
        taskset.agent = Agent("own", agent)
        model = Told(tokenizer, *lines)
        task = {"question": "Where is Vell?", "messages": [user("Where is Vell?")], "answer": "Vell"}
        row = Row("train-1", {"task": task})
        return asyncio.run(play_row(taskset, row, model, LIMITS)), model

    return play


async def chat(task, endpoint, stream=False, **more):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [user(task["question"])]
    while True:
        asked = {"model": endpoint.model, "messages": messages, "tools": [TOOL], **more}
        if stream:
            # openai's helper adds the pieces up, and wants strict tools.
            strict = [{"type": "function", "function": TOOL["function"] | {"strict": True}}]
            async with client.chat.completions.stream(**asked | {"tools": strict}) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True, exclude=PARSED))
        if not said.tool_calls:
            return float("Vell" in said.content)
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": FOUND})


async def chat_streamed(task, endpoint):
    return await chat(task, endpoint, stream=True)


async def responses(task, endpoint, stream=False):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    items = [user(task["question"])]
    tool = {"type": "function", "name": "search", "description": "Find.", "parameters": PARAMETERS}
    while True:
        asked = {"model": endpoint.model, "input": items, "tools": [tool | {"strict": True}]}
        if stream:
            async with client.responses.stream(**asked | {"tools": [tool]}) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return float("Vell" in answer.output_text)
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": FOUND} for call in calls
        ]


async def responses_streamed(task, endpoint):
    return await responses(task, endpoint, stream=True)


ANTHROPIC_TOOL = {"name": "search", "description": "Find.", "input_schema": PARAMETERS}


async def messages_by_a_blocking_client(task, endpoint):
    client = Anthropic(base_url=endpoint.base_url.removesuffix("/v1"), api_key=endpoint.api_key)
    said = [user(task["question"])]
    while True:
        asked = {"model": endpoint.model, "max_tokens": 100, "messages": said, "tools": [ANTHROPIC_TOOL]}
        answer = client.messages.create(**asked)
        said.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        if answer.stop_reason != "tool_use":
            return float("Vell" in answer.content[0].text)
        used = [block.id for block in answer.content if block.type == "tool_use"]
        said.append(user([{"type": "tool_result", "tool_use_id": one, "content": FOUND} for one in used]))


CLIENTS = [chat, chat_streamed, responses, responses_streamed]
CLIENTS += [messages_by_a_blocking_client, own_agents.langgraph, own_agents.anthropic]


@pytest.mark.parametrize("agent", CLIENTS, ids=lambda agent: agent.__name__)
@pytest.mark.parametrize("first", [CALL, f"<think>Hm.</think>\n{CALL}"], ids=["call", "thinking"])
def test_every_client_gives_one_row_of_the_ids_that_were_sampled(agent, first, played, monkeypatch):
    async def search(endpoint, query_list):
        return FOUND

    monkeypatch.setattr(own_agents, "search", search)
    (row,), model = played(agent, first, "It is <answer>Vell</answer>.")
    assert row.fault is None and row.score.reward == 1.0 and row.token_drift == 0
    (first_in, first_out), (second_in, second_out) = model.log
    assert second_in[: len(first_in + first_out)] == first_in + first_out
    assert row.prompt_ids == first_in and row.prompt_ids + row.response_ids == second_in + second_out
    trained = [token for token, kept in zip(row.response_ids, row.response_mask, strict=True) if kept]
    assert trained == first_out + second_out
    assert [log_prob for log_prob in row.log_probs if log_prob] == model.log_probs
    first, last = row.conversation.turns
    assert [message["content"] for message in first.answers] == [FOUND] and not last.answers


async def said(endpoint, messages, *, api_key=None, **more):
    """The model's next message."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=api_key or endpoint.api_key, max_retries=0)
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    return {"role": "assistant", "content": answer.choices[0].message.content}


async def post(endpoint, path, body, base_url=None):
    async with httpx.AsyncClient(timeout=60) as client:
        headers = {"x-api-key": endpoint.api_key}
        return await client.post(f"{base_url or endpoint.base_url}/{path}", json=body, headers=headers)


async def compacted(task, endpoint):
    """Forgets its first exchange, as an agent does whose context is full."""
    messages = [user("one")]
    for word in ("two", "three"):
        messages += [await said(endpoint, messages), user(word)]
    await said(endpoint, [user("in short: one, two"), *messages[-1:]])
    return 1.0


async def parallel(task, endpoint):
    """Asks one opening turn, and goes on from it in two ways at once."""
    opening = [user("plan"), await said(endpoint, [user("plan")])]
    await asyncio.gather(*(said(endpoint, [*opening, user(word)]) for word in ("left", "right")))
    return {"reward": 0.5, "speed": 2.0}


async def edited(task, endpoint):
    """Sends back another answer than it heard."""
    await said(endpoint, [user("plan")])
    await said(endpoint, [user("plan"), SAID, user("go on")])
    return [0.25, 0.5]


async def asks_again(task, endpoint):
    """Asks the same twice, then with a tool, then a helper with the same first words."""
    system = {"role": "system", "content": "be short"}
    for more in ({}, {}, {"tools": [TOOL]}):
        await said(endpoint, [system, user("plan")], **more)
    await said(endpoint, [system, user("help")])
    return 1.0


@pytest.mark.parametrize(
    ("agent", "calls", "rows"), [(compacted, 3, [2, 1]), (parallel, 3, [2, 1]), (edited, 2, [1, 1])]
)
def test_a_conversation_that_does_not_go_on_begins_a_row_and_no_token_is_trained_twice(
    agent, calls, rows, played
):
    found, model = played(agent, "a", "bb", "ccc")
    assert len(model.log) == calls and [len(row.extra["agent"]["places"]) for row in found] == rows
    trained = sum(sum(row.response_mask) for row in found)
    assert trained == sum(len(ids) for _, ids in model.log) == of_episode(found).tokens_out
    assert of_episode(found).tokens_in == sum(len(ids) for ids, _ in model.log)
    assert all(row.score == found[0].score for row in found) and not any(row.token_drift for row in found)


@pytest.mark.parametrize(
    ("agent", "begins"),
    [
        (compacted, ["a conversation of its own"]),
        (parallel, ["branches from call 1"]),
        (edited, ["rewrites call 1 from message 2 on"]),
        (asks_again, ["asks call 1 again", "has other tools than call 2", "a conversation of its own"]),
    ],
)
def test_dumps_and_answers_say_where_each_row_begins_and_which_part_of_it_is_trained(
    agent, begins, played, tmp_path
):
    found, _ = played(agent, "a", "bb", "ccc", "dddd")
    made = [
        StepRow(
            **{"key": f"p_0_{n}", "padding": False, "data_source": "agent", "extra_info": {"row": "train-1"}},
            **{"reward": reward_fields(found), "trajectory": one.conversation, "token_drift": 0},
            agent=one.agent,
        )
        for n, one in enumerate(found)
    ]
    dump_rows(made, 1, tmp_path / "trained" / "dumps" / "step_0001.jsonl")
    for run in (tmp_path, tmp_path / "trained"):
        (run / "resolved.yaml").touch()
    attempt = EpisodeAttempt(of_episode(found), None, 0.0)
    record = episode_record("agent", Row("train-1", {}), attempt)
    (tmp_path / "answers.jsonl").write_text(json.dumps(record))
    assert made[0].reward["turns"] == len(made[0].agent["calls"])
    (episode,) = read_trajectories(RunFolder(tmp_path / "trained"), [])
    (evaluated,) = read_trajectories(RunFolder(tmp_path), [])
    assert (evaluated.key, evaluated.agent) == ("train-1", episode.agent)
    assert evaluated.conversation == episode.conversation and record["turns"] == len(
        record["rows"][0]["agent"]["calls"]
    )
    rows = sorted(every_row(call_rows(episode.agent)), key=lambda row: row.number)
    assert [row.begins for row in rows] == ["begins the episode", *begins]
    assert [row.tokens for row in rows] == [sum(one.response_mask) for one in found]
    assert [row.tokens + row.tokens_before for row in rows] == [
        sum(bool(log_prob) for log_prob in one.log_probs) for one in found
    ]
    assert len(episode.conversation.turns) == len(episode.agent["calls"])  # each once
    assert [part.value for part in explain(episode)][-1] == found[0].score.reward


NUMBERED = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["Zürich"], "topk": 1}}\n</tool_call>'
WORDS = "It is  there."


def _arguments(written):
    """A client that writes the arguments of calls in its own way."""

    def change(said):
        for call in said["tool_calls"]:
            call["function"]["arguments"] = written(json.loads(call["function"]["arguments"]))

    return change


def _content(written):
    return lambda said: said.update(content=written(said["content"]))


SENT_BACK = {
    "as it was": (NUMBERED, lambda said: None, True),
    "no spaces": (NUMBERED, _arguments(lambda args: json.dumps(args, separators=(",", ":"))), True),
    "another order": (NUMBERED, _arguments(lambda args: json.dumps(dict(reversed(args.items())))), True),
    "1.0 for 1": (NUMBERED, _arguments(lambda args: json.dumps(args | {"topk": 1.0})), True),
    "escaped": (NUMBERED, _arguments(lambda args: json.dumps(args, ensure_ascii=True)), True),
    "an object": (NUMBERED, _arguments(lambda args: args), True),
    "another argument": (NUMBERED, _arguments(lambda args: json.dumps(args | {"topk": 2})), False),
    "content left out": (NUMBERED, lambda said: said.pop("content"), True),
    "empty content": (NUMBERED, _content(lambda text: ""), True),
    "no words": ("", lambda said: None, True),
    "trimmed": (WORDS, _content(lambda text: f"\n {text} "), True),
    "as a part": (WORDS, _content(lambda text: [{"type": "text", "text": text}]), True),
    "other blanks": (WORDS, _content(lambda text: text.replace("  ", " ")), False),
    "with its thinking": ("<think>Hm.</think>\nHere.", lambda said: None, True),
    "without its thinking": ("<think>Hm.</think>\nHere.", _content(lambda text: text[-5:]), False),
    "two calls": (f"{CALL}\n{CALL}", lambda said: said["tool_calls"], True),
    "one of two calls": (f"{CALL}\n{CALL}", lambda said: said["tool_calls"].pop(), False),
}


@pytest.mark.parametrize(("first", "change", "goes_on"), SENT_BACK.values(), ids=SENT_BACK)
def test_a_client_may_write_an_answer_in_its_own_way_and_one_that_edits_it_begins_a_row(
    first, change, goes_on, played
):
    async def agent(task, endpoint):
        body = {"messages": [USER], "tools": [TOOL]}
        message = (await post(endpoint, "chat/completions", body)).json()["choices"][0]["message"]
        change(message)
        calls = message.get("tool_calls") or ()
        found = [{"role": "tool", "tool_call_id": one["id"], "content": FOUND} for one in calls]
        answers = found[::-1] or [USER]
        await post(endpoint, "chat/completions", body | {"messages": [USER, message, *answers]})
        return 1.0

    rows, model = played(agent, first, "plain")
    assert len(rows) == (1 if goes_on else 2) and rows[0].fault is None
    assert sum(sum(row.response_mask) for row in rows) == sum(len(ids) for _, ids in model.log)
    assert not any(row.token_drift for row in rows)


def test_a_call_without_an_answer_when_its_agent_returns_is_not_trained(played, monkeypatch):
    begun = []

    async def slowly(self, prompt_ids, max_tokens, sample=Told.sample):
        begun.append(prompt_ids)
        await asyncio.sleep(2 if len(begun) == 2 else 0)
        return await sample(self, prompt_ids, max_tokens)

    async def leaves_a_call_behind(task, endpoint):
        def call():
            with suppress(httpx.HTTPError):
                asyncio.run(post(endpoint, "chat/completions", {"messages": [USER]}))

        await chat(task, endpoint)
        threading.Thread(target=call, daemon=True).start()
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        return 1.0

    monkeypatch.setattr(Told, "sample", slowly)
    (row,), model = played(leaves_a_call_behind, "<answer>Vell</answer>", "late")
    assert len(begun) == 2 and row.score.reward == 1.0
    assert sum(row.response_mask) == len(model.log[0][1]) and len(row.extra["agent"]["calls"]) == 1


def failing(error):
    async def agent(task, endpoint):
        raise error

    return agent


async def fails_in_a_group(task, endpoint):
    async with asyncio.TaskGroup() as group:
        group.create_task(failing(ValueError("no such town"))(task, endpoint))


def paid(reward):
    """Calls its model twice, and returns the reward."""

    async def agent(task, endpoint):
        await chat(task, endpoint)
        return reward

    return agent


async def asks_nothing(task, endpoint):
    return 1.0


async def asks_without_end(task, endpoint):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    for _ in range(200):
        client.chat.completions.create(model="policy", messages=[USER])


async def hangs(task, endpoint):
    await asyncio.sleep(60)


async def blocks(task, endpoint):
    time.sleep(8)


async def uses_another_key(task, endpoint):
    await said(endpoint, [USER], api_key="another")


async def asks_for_two_answers(task, endpoint):
    await said(endpoint, [USER], n=2)


async def begins_too_long(task, endpoint):
    with pytest.raises(BadRequestError, match="maximum context length"):
        await said(endpoint, [user("word " * 600)])
    return 1.0


GROUP = BaseExceptionGroup("several", [KeyboardInterrupt("now")])
REFUSED = "it raised BadRequestError: Error code:"
NASTY = {
    "raises": (failing(ValueError("no such town")), "raised", "it raised ValueError: no such town"),
    "exits": (failing(SystemExit(3)), "raised", "it raised RuntimeError: SystemExit: 3"),
    "gives up": (failing(TimeoutError("too late")), "raised", "it raised TimeoutError: too late"),
    "fails in a group": (fails_in_a_group, "raised", "it raised ValueError: no such town"),
    "is interrupted": (failing(GROUP), "raised", "it raised RuntimeError: BaseExceptionGroup: several"),
    "infinity": (paid([1e308, 1e308]), "no_reward", "the reward adds up to inf"),
    "nothing": (paid(None), "no_reward", "the reward is None (NoneType), not a number"),
    "not a number": (paid(float("nan")), "no_reward", "the reward is nan"),
    "too few calls": (paid([1.0, 1.0, 1.0]), "no_reward", "it returned 3 rewards for 2 model calls"),
    "asks nothing": (asks_nothing, "no_call", "it called its model not once"),
    "asks without end": (asks_without_end, "too_many_calls", "it called the model more than 5 times (env"),
    "hangs": (hangs, "timed_out", "it did not end within 1 s"),
    "blocks": (blocks, "timed_out", "it did not end within 1 s, nor when it was cancelled"),
    "another key": (uses_another_key, "another_key", "its model was called with the key of another episode"),
    "two answers": (asks_for_two_answers, "raised", f"{REFUSED} 400 - {{'error': {{'message': 'n: an"),
    "too long": (begins_too_long, "too_long", "its first messages are 6"),
}


@pytest.mark.parametrize(("agent", "name", "fault"), NASTY.values(), ids=NASTY)
def test_what_goes_wrong_has_its_name_and_no_score(agent, name, fault, played):
    limit_s = 1 if name == "timed_out" else 60  # a busy machine takes seconds to import a client
    rows, _ = played(agent, *[CALL, "<answer>Vell</answer>"] * 3, max_calls=5, timeout_s=limit_s)
    assert all(row.score is None and row.ended == "fault" for row in rows)
    assert rows[0].fault.startswith(f"agent:own_agents:langgraph: {fault}")
    assert rows[0].fault.endswith("[row train-1]")
    assert [one["name"] for one in rows[0].extra["agent"]["faults"]] == [name]


COMMANDS = {
    "print('a line before'); print(json.dumps({'reward': 0.5, 'seen': float('KEY' in str(task))}))": None,
    "print('good')": "it raised RuntimeError: the command's last line is no reward: 'good'",
    "sys.exit('no town')": "it raised RuntimeError: the command exited with 1: no town",
    "time.sleep(60)": "it did not end within 3 s",
    "print()": "it raised RuntimeError: the command's last line is no reward: ''",
    "print(float('nan'))": "it raised RuntimeError: the command's last line is no reward: 'nan'",
    "print('NaN')": "the reward is nan",
    "print('x' * 5_000_000); print(1)": None,
}


@pytest.mark.parametrize(("line", "fault"), COMMANDS.items())
def test_an_agent_may_be_a_command_with_packages_of_its_own(line, fault, played, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, time, urllib.request\ntask = json.load(sys.stdin)\n"
        "body = {'model': os.environ['MODEL'], 'messages': task['messages']}\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()\n"
        f"{line}\n"
    )
    agent = load_agent(f"command: {sys.executable} {script}", {})
    (row,), model = played(
        agent.play, "<answer>Vell</answer>", timeout_s=3 if fault and "end within" in fault else 60
    )
    assert len(model.log) == 1 and sum(row.response_mask) == len(model.log[0][1])
    if fault is None:
        parts = {"reward": 0.5, "seen": 0.0} if "seen" in line else {}
        assert row.score.parts == parts and row.score.reward == parts.get("reward", 1.0)
    else:
        assert row.score is None and fault in row.fault


@pytest.mark.parametrize("end", ["time.sleep(60)", "print(1.0)"], ids=["hangs", "ends"])
def test_what_a_command_started_ends_with_it(end, played, tmp_path):
    script, started = tmp_path / "agent.py", tmp_path / "pid"
    nothing = "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    script.write_text(
        "import pathlib, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60'], {nothing})\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n{end}\n"
    )
    played(load_agent(f"command: {sys.executable} {script}", {}).play, timeout_s=3)
    state = Path(f"/proc/{started.read_text()}/stat")
    until = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":  # not reaped here
        assert time.monotonic() < until
        time.sleep(0.05)


def test_commands_start_at_once_under_the_loop_of_verls_workers(tasks, tokenizer):
    script = "import json, sys; json.load(sys.stdin); print(1.0)"
    agent = load_agent(f'command: {sys.executable} -c "{script}"', {})

    async def play():
        endpoint = Endpoint("http://127.0.0.1:1/v1", "key")
        threads = [_Thread(lambda: agent.play({"question": "?"}, endpoint)) for _ in range(16)]
        return await asyncio.gather(*(thread.result() for thread in threads))

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        assert asyncio.run(play()) == [1.0] * 16
    finally:
        asyncio.set_event_loop_policy(before)


def test_a_failed_episode_begins_again_and_that_is_counted(played):
    begun = []

    async def fails_once(task, endpoint):
        begun.append(endpoint.base_url)
        if len(begun) == 1:
            raise ValueError("a moment")
        return await chat(task, endpoint)

    (row,), _ = played(fails_once, "<answer>Vell</answer>", tries=2)
    assert row.score.reward == 1.0 and len(set(begun)) == 2
    (fault,) = row.extra["agent"]["faults"]
    assert fault["name"] == "raised" and fault["text"].startswith("it raised ValueError: a moment")


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
OLD_CALL = {"function": {"name": "search", "arguments": DEEP}}
OLD_ITEM = {"type": "function_call", "name": "search", "call_id": "1", "arguments": DEEP}
SERVERS_TOOL = {"type": "web_search_20250305", "name": "web_search"}
SCHEMA = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
REQUESTS = [
    ("chat/completions", {"messages": [USER, SAID]}, None),
    ("chat/completions", {"messages": [user(None)]}, None),
    ("chat/completions", {"messages": [user(IMAGE)]}, "messages.0.content.0.type:"),
    ("chat/completions", {"messages": [USER], "max_tokens": -5}, "max_tokens: an answer has at least one"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [OLD_CALL]}]}, "RecursionError"),
    ("responses", {"input": [user(None)]}, None),
    ("responses", {"input": [{"content": "x"}]}, "a message's role is one of user, assistant"),
    ("responses", {"input": [{"role": "robot", "content": "x"}]}, "a message's role is one of user"),
    ("responses", {"input": [user(["x"])]}, "AttributeError"),
    ("responses", {"input": [USER, OLD_ITEM]}, "RecursionError"),
    ("responses", {"input": "hi", "text": SCHEMA}, "text.format: answers are text"),
    ("responses", {"input": "hi", "text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
    ("responses", {"input": "hi", "max_output_tokens": 0}, "max_tokens: an answer has at least one"),
    ("messages", {"messages": [USER, SAID]}, "messages: the last is the assistant's"),
    ("messages", {"messages": [user("")]}, None),
    ("messages", {"messages": [user([])]}, None),
    ("messages", {"messages": [USER], "tools": [SERVERS_TOOL]}, "tools.0.type: this server takes"),
    ("messages", {"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice.type: this server takes"),
    ("messages", {"messages": [USER], "tool_choice": {"type": "auto"}}, None),
    ("messages/count_tokens", {"messages": [user([])]}, None),
    ("messages/count_tokens", {"messages": []}, "messages: List should have at least 1 item"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_answered_or_refused_in_words(stream, played):
    async def agent(task, endpoint):
        for path, body, why in REQUESTS:
            asked = body | ({"stream": True} if stream and "count" not in path else {})
            answer = await post(endpoint, path, asked)
            assert answer.status_code == (400 if why else 200), (path, answer.text)
            assert (why or "") in answer.text
        return 1.0

    rows, model = played(agent, *"a" * len(REQUESTS))
    assert rows[0].fault is None and len(rows) == len(model.log)
    assert not any(row.ended == "tokens" for row in rows)  # a refused limit is no lack of room


def test_a_tool_that_is_not_to_be_called_is_not_shown(played):
    async def agent(task, endpoint):
        sent = []
        for choice in ({"type": "none"}, None):
            body = {"messages": [USER], "tools": [ANTHROPIC_TOOL], "tool_choice": choice}
            answer = await post(endpoint, "messages", body)
            sent.append(answer.json()["usage"]["input_tokens"])
        assert sent[0] < sent[1]
        return 1.0

    assert played(agent, "a", "b")[0][0].fault is None


def test_messages_that_cannot_fit_hold_nobody_up(played):
    async def agent(task, endpoint):
        told = [USER, await said(endpoint, [USER]), user("word " * 10_000_000)]
        for messages in (told, told[-1:]):
            began = time.monotonic()
            with pytest.raises(BadRequestError, match=r"maximum context length: .*50000000 characters"):
                await said(endpoint, messages)
            assert time.monotonic() - began < 10  # to tokenize them takes minutes
        return 1.0

    (row,), _ = played(agent, "a")
    assert "its first messages are 50000000 characters, more than the tokens of" in row.fault
    assert row.extra["agent"]["faults"][0]["name"] == "too_long"


def test_a_key_that_is_no_text_is_another_key():
    sent = b"Bearer \xff".decode("utf-8", "surrogateescape")  # as aiohttp reads a header
    assert not _same(sent, "key") and _same("Bearer key", "key") and _same("key", "key")


def test_who_calls_the_model_of_another_with_its_own_key_is_at_fault_and_not_the_other(tasks, tokenizer):
    there, called = [], asyncio.Event()

    async def agent(task, endpoint):
        there.append(endpoint)
        if len(there) == 1:
            while not called.is_set():
                await asyncio.sleep(0.01)
            return await chat(task, endpoint)
        refused = await post(endpoint, "chat/completions", {"messages": [USER]}, there[0].base_url)
        assert refused.status_code == 401
        called.set()
        return await chat(task, endpoint)

    async def both():
        taskset = AgentTaskset("own_agents:langgraph", data=str(tasks), tries=1)
        taskset.agent = Agent("own", agent)
        rows = [Row(f"train-{n}", {"task": {"question": "Where is Vell?"}}) for n in range(2)]
        model = Told(tokenizer, *["<answer>Vell</answer>"] * 2)
        return await asyncio.gather(*(play_row(taskset, row, model, LIMITS) for row in rows))

    found = [row for rows in asyncio.run(both()) for row in rows]
    (failed,) = (row for row in found if row.fault)
    assert failed.extra["agent"]["faults"][0]["name"] == "another_key"
    assert failed.fault.startswith(
        "agent:own_agents:langgraph: it called the model of another episode with its own key"
    )


def test_a_gateway_and_its_sessions_end_with_their_loop(played):
    before = [kind for kind in gc.get_objects() if isinstance(kind, Gateway | AgentSession)]
    for _ in range(3):
        played(chat, "<answer>Vell</answer>")
    gc.collect()
    after = [kind for kind in gc.get_objects() if isinstance(kind, Gateway | AgentSession)]
    assert len(after) <= len(before)


def test_an_address_ends_with_its_episode(played):
    kept = []

    async def keeps(task, endpoint):
        kept.append(endpoint)
        return await chat(task, endpoint)

    played(keeps, "<answer>Vell</answer>")
    assert kept[0].base_url.startswith("http://127.0.0.1:")
    with pytest.raises(httpx.ConnectError):  # the loop that served it has ended
        httpx.get(f"{kept[0].base_url}/models")
