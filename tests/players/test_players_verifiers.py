"""Episodes that the library `verifiers` plays itself, with a scripted model."""

import asyncio
import json
import sys
from dataclasses import replace
from itertools import chain

import httpx
import pytest
import verifiers.v1 as vf
from agent_loops import EPISODES, Engine, run_loop
from told_model import Told
from verifiers.v1 import graph
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, UserMessage
from verifiers.v1.utils.aio import run_shielded

from drzero.players.verifiers.endpoint import Endpoint
from drzero.players.verifiers.host import Host
from drzero.players.verifiers.player import _Play
from drzero.players.verifiers.renderer import ChatRenderer, ChatRendererConfig
from drzero.players.verifiers.session import Clock, Session
from environments.registry import find
from environments.row import Row
from verl_ext.episodes import Answered, EpisodeLimits, Sampled, play_row
from verl_ext.method.chat import next_turn_ids, render_prompt_ids
from verl_ext.rollout.environment_agent_loop import EnvironmentAgentLoop

LIMITS = EpisodeLimits(prompt_tokens=400, response_tokens=400, tokens_per_turn=60)

TASKSET = '''
"""Says a word back, twice. The task's word chooses the fault."""
import asyncio
import time
import verifiers.v1 as vf


class Word(vf.TaskData):
    word: str


class Say(vf.Task[Word]):
    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        if self.data.word == "raise":
            raise ValueError("no\\nwords today")
        if self.data.word == "hang":
            await asyncio.sleep(600)
        if self.data.word == "block":
            time.sleep(20)
        if self.data.word == "nan":
            return float("nan")
        return float(self.data.word in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class SayEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            if not segment.terminated:
                await talk.turn("Once more.")


class Config(vf.TasksetConfig):
    words: list[str] = ["plum", "raise", "hang", "block", "nan"]


class SayTaskset(vf.Taskset[Say, Config]):
    def load(self):
        return [Say(Word(prompt=f"Say {word}.", system_prompt="You say words.", word=word), self.config.task)
                for word in self.config.words]


__all__ = ["SayTaskset", "SayEnv"]
'''

TWO_AGENTS = """
import verifiers.v1 as vf
from say_words import SayTaskset


class PairConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.other.trainable = self.config.taskset.words[0] != "plum"

    async def run(self, task, agents):
        await agents.one.run(task)
        await agents.other.run(task)


class PairTaskset(SayTaskset):
    pass


__all__ = ["PairTaskset", "PairEnv"]
"""

TOOLS = '''
"""Asks for the time in a place, which a tool knows."""
import verifiers.v1 as vf


class Clocks(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "clock"

    @vf.tool
    def time_in(self, place: str) -> str:
        """The time in a place."""
        return f"noon in {place}"


class ClockConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Ask(vf.Task[vf.TaskData, vf.State, ClockConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Clocks(config.tools)]

    @vf.reward(weight=1.0)
    async def told(self, trace: vf.Trace) -> float:
        return float("noon" in trace.last_reply)


class AskConfig(vf.TasksetConfig):
    task: ClockConfig = ClockConfig()


class AskTaskset(vf.Taskset[Ask, AskConfig]):
    def load(self):
        return [Ask(vf.TaskData(prompt="What time is it in Orrin?"), self.config.task)] * 2


__all__ = ["AskTaskset"]

if __name__ == "__main__":
    Clocks.run()
'''


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasksets")
    for name, source in {"say_words": TASKSET, "say_pairs": TWO_AGENTS, "clocks": TOOLS}.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield
        for name in ("say_words", "say_pairs", "clocks"):
            sys.modules.pop(name, None)


def play(model, word="plum", limits=LIMITS, **options):
    """One episode of the words."""
    taskset = find("verifiers:say-words").load(evaluation={}, words=[word], **options)
    (row,) = taskset.rows("train", None, seed=0)
    return asyncio.run(play_row(taskset, row, model, limits))


def trained(played):
    return [i for i, kept in zip(played.response_ids, played.response_mask, strict=True) if kept]


def test_an_episode_of_several_turns_is_one_row_of_sampled_ids(tokenizer):
    model = Told(tokenizer, "a  plum ,", "plum")  # decoded and rendered again, its ids would differ
    (played,) = play(model)
    first, second = model.inputs
    opening = [{"role": "system", "content": "You say words."}, {"role": "user", "content": "Say plum."}]
    assert played.prompt_ids == first == render_prompt_ids(tokenizer, opening, None)
    more = next_turn_ids(tokenizer, model.outputs[0], [{"role": "user", "content": "Once more."}])
    assert second == first + model.outputs[0] + more
    assert played.prompt_ids + played.response_ids == second + model.outputs[1]
    assert trained(played) == model.outputs[0] + model.outputs[1]
    assert played.token_drift == 0
    assert (played.tokens_in, played.tokens_out) == (len(first) + len(second), len(model.log_probs))


def test_log_probs_are_the_models_and_the_score_is_the_librarys(tokenizer):
    model = Told(tokenizer, "no", "plum")
    (played,) = play(model)
    masked = list(zip(played.log_probs, played.response_mask, strict=True))
    assert [value for value, mask in masked if mask] == model.log_probs  # to the last bit
    assert all(value == 0 for value, mask in masked if not mask)
    assert (played.score.reward, played.score.success) == (2.0, True)
    assert played.score.parts == {"said": 2.0, "turns": 2.0}
    assert [turn.text for turn in played.conversation.turns] == ["no", "plum"]
    assert played.conversation.turns[0].answers == ({"role": "user", "content": "Once more."},)
    (played,) = play(Told(tokenizer, "plum", "plum"), solved_at=3.0)
    assert not played.score.success


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("raise", "verifiers:say-words failed: TaskError: "),
        ("hang", "verifiers:say-words did nothing for 1 s"),
        ("nan", "verifiers:say-words: a reward is a finite number, not nan (float)"),
    ],
)
def test_a_tasksets_fault_is_one_line_and_not_a_zero(word, said, tokenizer):
    timeout_s = 1.0 if word == "hang" else 60.0
    (played,) = play(Told(tokenizer, "x", "y"), word, timeout_s=timeout_s)
    assert played.score is None and played.ended == "fault"
    assert played.fault.startswith(said) and "\n" not in played.fault
    assert played.fault.endswith("[row train-0]")
    assert trained(played) and played.token_drift == 0  # the turns so far can be read


def test_a_blocked_thread_is_abandoned_and_the_next_episode_is_played(tokenizer):
    taskset = find("verifiers:say-words").load(evaluation={}, words=["block", "plum"], timeout_s=3.0)
    rows = taskset.rows("train", None, seed=0)
    block, plum = sorted(rows, key=lambda row: str(row.data["task"]["word"]))

    async def both():
        blocked = await play_row(taskset, block, Told(tokenizer, "x", "y"), LIMITS)
        return blocked + await play_row(taskset, plum, Told(tokenizer, "x", "plum"), LIMITS)

    first, second = asyncio.run(both())
    assert "Say.said" in first.fault
    assert second.score.reward == 2.0


def test_a_host_waits_for_the_librarys_cleanups_before_it_closes():
    # They swallow every exception, and one destroyed unfinished would keep the process alive.
    taskset = find("verifiers:say-words").load(evaluation={})
    ended = []

    async def cleanup():
        await asyncio.sleep(0.5)
        ended.append("cleanup")

    async def close():
        host = Host(taskset, taskset.rows("train", 1, seed=0)[0])
        await host.ready(60)
        asyncio.run_coroutine_threadsafe(run_shielded(cleanup()), host._loop)
        await asyncio.to_thread(host.close)
        return host

    host = asyncio.run(close())
    host._thread.join(5)
    assert (ended, host._loop.is_closed(), host._thread.is_alive()) == (["cleanup"], True, False)


def test_an_engines_error_is_raised_and_not_a_fault(tokenizer):
    with pytest.raises(ConnectionError, match="the engine is gone"):
        play(Told(tokenizer, "x", ConnectionError("the engine is gone")))


def test_an_episode_without_room_for_a_turn_ends_and_is_scored(tokenizer):
    model = Told(tokenizer, "plum", "never said")
    (played,) = play(model, limits=replace(LIMITS, response_tokens=4))
    assert (len(model.inputs), played.ended, played.token_drift) == (1, "tokens", 0)
    assert played.score.reward == 2.0


def test_a_turn_has_a_token_limit(tokenizer):
    model = Told(tokenizer, "plum plum plum plum plum", "plum")
    (played,) = play(model, limits=replace(LIMITS, tokens_per_turn=3))
    assert list(map(len, model.outputs)) == [3, 3] and played.token_drift == 0
    assert model.outputs[0][-1] != tokenizer.eos_token_id
    ended = [ids[-1] == tokenizer.eos_token_id for ids in model.outputs]
    assert [turn.truncated for turn in played.conversation.turns] == [not end for end in ended]


def test_a_too_long_first_message_is_a_fault(tokenizer):
    model = Told(tokenizer)
    (played,) = play(model, limits=replace(LIMITS, prompt_tokens=10))
    assert "data.max_prompt_length=10" in played.fault and model.inputs == []


def test_the_taskset_limits_the_turns(tokenizer):
    model = Told(tokenizer, "plum", "never said")
    (played,) = play(model, max_turns=1)
    assert (len(model.inputs), played.ended) == (1, "turns") and played.score is not None


@pytest.mark.parametrize(("words", "agents"), [(["plum"], 1), (["pear"], 2)])
def test_an_episode_has_one_agent_to_train(words, agents, tokenizer):
    taskset = find("verifiers:say-pairs").load(evaluation={}, words=words)
    (row,) = taskset.rows("train", None, seed=0)
    model = Told(tokenizer, "plum", "pear")
    branches = asyncio.run(play_row(taskset, row, model, LIMITS))
    assert len(branches) == agents and [trained(played) for played in branches] == model.outputs[:agents]
    faults = {played.fault for played in branches}
    if agents == 1:
        assert faults == {None} and branches[0].score is not None
    else:
        said = "verifiers:say-pairs: an episode has 2 agents to train, and veRL's row has one reward"
        assert faults == {f"{said} [row train-0]"}


@pytest.mark.slow("two processes of the library for each of its tool servers")
def test_tools_are_called_and_invalid_calls_are_explained(tokenizer):
    call = '<tool_call>\n{"name": "clock_time_in", "arguments": {"place": "Orrin"}}\n</tool_call>'
    wrong = call.replace("clock_time_in", "clock_date_in")
    half = call.replace("Orrin", "\\ud83d")
    model = Told(tokenizer, wrong, "<tool_call>\nclock\n</tool_call>", half, call, "It is noon.")
    taskset = find("verifiers:clocks").load()
    row = taskset.rows("train", None, seed=0)[0]
    (played,) = asyncio.run(play_row(taskset, row, model, LIMITS))
    assert played.score.reward == 1.0
    answers = [turn.answers[0]["content"] for turn in played.conversation.turns[:-1]]
    assert answers == [
        "Error: there is no tool 'clock_date_in'; the tools are clock_time_in",
        *["Error: the call is not a JSON object that names a tool"] * 2,
        "noon in Orrin",
    ]
    assert [call.valid for call in played.conversation.calls] == [False, False, False, True]
    assert trained(played) == list(chain.from_iterable(model.outputs)) and played.token_drift == 0


def test_each_branch_of_a_trace_is_a_row(tokenizer):
    # A program that rewrites earlier messages has a branch for each version.
    trace = _trace()
    session = Session(Told(tokenizer), LIMITS, Clock())
    for prompt, ids, drawn in (("one", [1, 2, 3], [7, 8]), ("two", [4, 5], [9])):
        _commit(trace, prompt, ids, drawn)
        session.asked.append(Answered(ids, Sampled(drawn, [-1.0] * len(drawn))))
    player = _player(tokenizer, trace, session)
    first, second = player._branches(trace)
    assert (first.prompt_ids, first.response_ids) == ([1, 2, 3], [7, 8])
    assert (second.prompt_ids, second.response_ids) == ([4, 5], [9])
    assert first.token_drift == second.token_drift == 0
    assert [played.tokens_out for played in (first, second)] == [2, 1]


@pytest.mark.parametrize("wrong", ["changed", "added", "lost"])
def test_ids_that_were_not_sampled_are_token_drift(wrong, tokenizer):
    trace = _trace()
    session = Session(Told(tokenizer), LIMITS, Clock())
    _commit(trace, "one", [1, 2, 3], [7, 8])
    sampled = {"changed": [7, 9], "added": [7], "lost": [7, 8]}[wrong]
    session.asked.append(Answered([1, 2, 3], Sampled(sampled, [-1.0] * len(sampled))))
    if wrong == "lost":  # sampled, but on no branch
        session.asked.append(Answered([1, 2, 3, 7, 8, 5], Sampled([6], [-1.0])))
    (played,) = _player(tokenizer, trace, session)._branches(trace)
    assert played.token_drift == 1


def _trace():
    agent = vf.AgentInfo(config=vf.AgentConfig())
    task = vf.TraceTask(type="Task", data=vf.TaskData(prompt="one"))
    return vf.Trace(task=task, agent=agent, state=vf.State())


def _commit(trace, prompt, prompt_ids, drawn):
    turn = graph.prepare_turn(trace, [UserMessage(content=prompt)], [])
    tokens = TurnTokens(
        prompt_ids=prompt_ids,
        completion_ids=drawn,
        completion_logprobs=[-1.0] * len(drawn),
        message_spans=[(0, len(prompt_ids))],
    )
    message = AssistantMessage(content=prompt.upper())
    turn.commit(Response(id="", created=0, model="m", message=message, finish_reason="stop", tokens=tokens))


def _player(tokenizer, trace, session):
    taskset = find("verifiers:say-words").load()
    player = _Play(taskset, Row("train-0", {}), Told(tokenizer), LIMITS)
    player._traces, player._sessions = [trace], {trace.id: session}
    return player


def test_the_endpoint_is_on_loopback_and_knows_only_its_episodes(tokenizer):
    async def asked():
        server = await Endpoint.running()
        assert await Endpoint.running() is server  # one per loop
        server.sessions["known"] = Session(Told(tokenizer, "x"), LIMITS, Clock())
        bodies = [("unknown", [1]), ("known", "x"), ("known", [1])]
        return server.url, [await asyncio.to_thread(_post, server.url, *body) for body in bodies]

    url, codes = asyncio.run(asked())
    assert url.startswith("http://127.0.0.1:") and codes == [404, 400, 200]
    with pytest.raises(httpx.ConnectError):  # closed with its loop
        _post(url, "known", [1])


def _post(url, trace_id, ids):
    body, headers = {"token_ids": ids}, {"X-Session-ID": trace_id}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers=headers, trust_env=False)
    return answer.status_code


def test_a_game_does_not_read_thinking(tokenizer):
    renderer = ChatRenderer(tokenizer, ChatRendererConfig())

    def parsed(text, before=""):
        ids, prompt = (tokenizer.encode(one, add_special_tokens=False) for one in (text, before))
        response = renderer.parse_response(ids, prompt_ids=prompt)
        return response.content.strip(), response.reasoning_content

    assert parsed("<think>\nis it [1]?\n</think>\n[2]") == ("[2]", "is it [1]?")
    assert parsed("is it [1]?\n</think>\n[2]", "<think>\n") == ("[2]", "is it [1]?")
    assert parsed("still thinking [1]", "<think>\n")[0] == ""
    assert parsed("[2]") == ("[2]", None)


def test_verls_agent_loop_plays_a_taskset(tokenizer):
    taskset = find("verifiers:say-words").load(evaluation={}, words=["plum"])
    (row,) = taskset.rows("train", None, seed=0)
    rollout = {"prompt_length": 400, "response_length": 400, "multi_turn": {}}
    engine = Engine(tokenizer, "no", "plum")
    options = {"evaluation": {}, "words": ["plum"]}
    own = EPISODES | {"environment": "verifiers:say-words", "folder": None, "options": options}
    drawn = {"extra_info": {"row": row.id, "task": json.dumps(dict(row.data))}}
    (output,) = run_loop(
        EnvironmentAgentLoop, rollout, engine, tokenizer, drawn, **own, max_tokens_per_turn=60
    )
    assert output.reward_score == 2.0 and output.extra_fields["token_drift"] == 0
    assert output.extra_fields["global_steps"] == 0
    assert trained(output) == engine.outputs[0] + engine.outputs[1]
    assert list(map(bool, output.response_logprobs)) == list(map(bool, output.response_mask))
