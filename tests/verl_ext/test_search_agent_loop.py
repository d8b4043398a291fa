"""The agent loop over veRL's own state machine, with a scripted engine and a real search service."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Peer, StartPeer, unused_port
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolListWrap
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from data.search_taskset import SearchTaskset
from environments.row import Row
from search.client import SearchClient
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.episodes import EpisodeLimits, Sampled, play_row
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_tool_schema import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.tool_calls import parse_tool_calls, render_tool_call
from verl_ext.method.trajectory import Trajectory
from verl_ext.rollout.search_agent_loop import PARSER_NAME, SearchAgentLoop, SearchCallParser
from verl_ext.rollout.search_tool import UNAVAILABLE, SearchTool

PASSAGE = {"title": "Vell", "text": "A river.", "contents": "Vell\nA river."}
PROMPT = [{"role": "user", "content": "Ask."}]
FINAL = "<question>Which?</question><answer>Vell</answer>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


class Engine:
    """Gives scripted replies, one a call, and remembers what it was given."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self._turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
        self._eos = tokenizer.eos_token_id
        self.inputs: list[list[int]] = []
        self.caps: list[int] = []

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        self.inputs.append(list(prompt_ids))
        self.caps.append(sampling_params["max_tokens"])
        ids = [*self._turns[len(self.inputs) - 1], self._eos][: self.caps[-1]]
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields={"global_steps": 0}, num_preempted=0
        )


def roll_out(
    tokenizer: Any, url: str, *turns: str, response_length: int = 400, cap: int = 100
) -> tuple[AgentLoopOutput, Engine]:
    """One rollout of veRL's loop."""
    multi_turn = {
        "max_user_turns": 5,
        "max_assistant_turns": 5,
        "max_parallel_calls": MAX_CALLS_PER_TURN,
        "format": PARSER_NAME,
    }
    multi_turn |= {"max_tool_response_length": 1000, "tool_response_truncate_side": "middle"}
    rollout = {"multi_turn": multi_turn, "prompt_length": 300, "response_length": response_length}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**rollout, "full_determinism": False}}})
    tool = SearchTool({"retrieval_url": url, "topk": 2, "deadline_s": 2.0, "response_limit": 300}, None)
    engine = Engine(tokenizer, *turns)

    async def run() -> AgentLoopOutput:
        loop = SearchAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=engine,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(OmegaConf.create({})),
            tools=ToolListWrap([tool]),
            hf_model_type="llama",
            max_tokens_per_turn=cap,
        )
        return await loop.run({"temperature": 1.0}, raw_prompt=PROMPT, tools_kwargs={}, extra_info={})

    return asyncio.run(run()), engine


def library(request: dict[str, Any]) -> dict[str, Any]:
    return {"result": [[PASSAGE] * 2 for _ in request["queries"]]}


def trajectory(output: AgentLoopOutput) -> Trajectory:
    return Trajectory.from_dict(output.extra_fields["trajectory"])


def test_a_search_becomes_a_structured_turn_with_the_text_as_shown(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    output, _ = roll_out(tokenizer, start_peer("/retrieve", library).url, render_tool_call(["Vell"]), FINAL)
    first, last = trajectory(output).turns
    assert first.calls[0].queries == ("Vell",) and not first.calls[0].failed
    assert first.calls[0].response == format_passages(["Vell"], [[PASSAGE] * 2], 300)
    assert (last.text, last.calls, last.truncated) == (FINAL, (), False)
    assert output.extra_fields["token_drift"] == 0


def test_every_turns_input_is_what_the_solvers_agent_would_send(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    call = render_tool_call(["Vell"])
    output, engine = roll_out(tokenizer, start_peer("/retrieve", library).url, call, FINAL)
    first = render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])
    turn = [*tokenizer.encode(call, add_special_tokens=False), tokenizer.eos_token_id]
    shown = format_passages(["Vell"], [[PASSAGE] * 2], 300)
    assert engine.inputs == [first, first + turn + tool_turn_ids(tokenizer, turn, [shown])]
    assert output.prompt_ids == first


def test_equal_calls_of_one_turn_are_each_answered(tokenizer: Any, start_peer: StartPeer) -> None:
    twice = render_tool_call(["Vell"]) * 2
    output, _ = roll_out(tokenizer, start_peer("/retrieve", library).url, twice, FINAL, cap=200)
    assert len(trajectory(output).searches) == 2
    assert output.extra_fields["token_drift"] == 0


def test_an_engine_that_returns_no_token_loses_the_rollout(tokenizer: Any, start_peer: StartPeer) -> None:
    with pytest.raises(RuntimeError, match="returned no token"):
        roll_out(tokenizer, start_peer("/retrieve", library).url, FINAL, cap=0)


def test_a_service_that_is_down_marks_the_call_as_failed(tokenizer: Any) -> None:
    output, _ = roll_out(tokenizer, f"http://127.0.0.1:{unused_port()}", render_tool_call(["Vell"]), FINAL)
    (call,) = trajectory(output).failed_calls
    assert call.response == UNAVAILABLE and "ConnectError" in str(call.error)
    assert output.extra_fields["token_drift"] == 0


def test_an_invalid_call_is_explained_to_the_model_and_costs_no_search(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    peer = start_peer("/retrieve", library)
    output, engine = roll_out(tokenizer, peer.url, "<tool_call>Vell</tool_call>", FINAL)
    (call,) = trajectory(output).calls
    assert not call.valid and not call.failed and peer.requests == []
    assert "Error: the call is not JSON" in tokenizer.decode(engine.inputs[1])


def test_a_turn_is_capped_and_marked_where_the_cap_cut_it(tokenizer: Any, start_peer: StartPeer) -> None:
    output, engine = roll_out(tokenizer, start_peer("/retrieve", library).url, FINAL, cap=5)
    assert engine.caps == [5]
    assert trajectory(output).turns[0].truncated


def test_a_turn_that_just_fits_its_cap_is_not_marked(tokenizer: Any, start_peer: StartPeer) -> None:
    whole = len(tokenizer.encode(FINAL, add_special_tokens=False)) + 1
    output, _ = roll_out(tokenizer, start_peer("/retrieve", library).url, FINAL, cap=whole)
    assert not trajectory(output).turns[0].truncated


def test_the_cap_shrinks_to_the_room_that_is_left_in_the_response(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    peer = start_peer("/retrieve", library)
    output, engine = roll_out(tokenizer, peer.url, render_tool_call(["Vell"]), FINAL, response_length=110)
    room = 110 - (len(engine.inputs[1]) - len(engine.inputs[0]))
    assert engine.caps == [100, room]
    assert len(output.response_ids) == len(output.response_mask) <= 110
    assert output.extra_fields["token_drift"] == 0


def test_calls_beyond_the_limit_of_a_turn_stay_unanswered(tokenizer: Any, start_peer: StartPeer) -> None:
    peer = start_peer("/retrieve", library)
    many = render_tool_call(["Vell"]) * (MAX_CALLS_PER_TURN + 1)
    output, _ = roll_out(tokenizer, peer.url, many, FINAL, response_length=1500, cap=600)
    assert [known.answered for known in trajectory(output).calls] == [True] * MAX_CALLS_PER_TURN + [False]
    assert len(peer.requests) == MAX_CALLS_PER_TURN


def converse(
    tokenizer: Any, start_peer: StartPeer, url: str, *turns: str, response_length: int = 400, cap: int = 100
) -> tuple[Conversation, Peer]:
    """The same script and limits as in `roll_out`, played by the agent for served models."""
    script = [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns]
    limit = len(render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])) + response_length

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        ids = script[len(model.requests) - 1][: request["max_tokens"]]
        reason = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        return {"choices": [{"text": "by its ids", "token_ids": ids, "finish_reason": reason}]}

    model = start_peer("/v1/completions", complete)

    async def run() -> Conversation:
        agent = SearchAgent(
            f"{model.url}/v1/completions",
            "policy",
            tokenizer,
            SearchClient(url, topk=2, deadline_s=2.0),
            topk=2,
            max_tokens_per_turn=cap,
            max_context_tokens=limit,
            max_turns=5,
            tool_response_limit=300,
        )
        try:
            return await agent.converse(PROMPT)
        finally:
            await agent.aclose()

    return asyncio.run(run()), model


VELL = render_tool_call(["Vell"])


def test_queries_that_the_service_refuses_are_an_invalid_call_in_training_and_against_a_served_model(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    url = start_peer("/retrieve", lambda _: 413).url
    output, engine = roll_out(tokenizer, url, VELL, FINAL)
    conversation, model = converse(tokenizer, start_peer, url, VELL, FINAL)
    (call,) = trajectory(output).calls
    assert not call.valid and not call.failed
    assert (call.response or "").startswith("Error: the search service refuses these queries (")
    assert conversation.finished and conversation.trajectory == trajectory(output)
    assert [request["prompt"] for request in model.requests] == engine.inputs


@pytest.mark.parametrize(
    ("turns", "limits"),
    [
        ([FINAL], {}),
        ([VELL, FINAL], {}),
        ([f"<think>A river?</think>\n{VELL}", f"<think>So.</think>\n{VELL}", FINAL], {}),
        ([VELL * 2 + render_tool_call(["Orrin", "Ostrel"]), FINAL], {}),
        ([f"<tool_call>Vell</tool_call>{VELL}", FINAL], {}),
        ([VELL * (MAX_CALLS_PER_TURN + 1), FINAL], {"response_length": 1500, "cap": 600}),
        (["I give up."], {}),
        (["<|im_start|>assistant\n" + VELL, "<|endoftext|>" + FINAL], {}),
        ([VELL] * 5, {"response_length": 1500}),
        ([FINAL], {"cap": 5}),
        ([VELL, FINAL], {"response_length": 110}),
    ],
    ids=[
        "no search",
        "a search",
        "two searches",
        "several calls in a turn",
        "an invalid call",
        "more calls than a turn may have",
        "neither call nor question",
        "special tokens inside a turn",
        "the last turn is a call",
        "a turn cut by its cap",
        "a turn cut by the room that is left",
    ],
)
def test_one_script_is_one_conversation_in_training_and_against_a_served_model(
    tokenizer: Any, start_peer: StartPeer, turns: list[str], limits: dict[str, int]
) -> None:
    library_url = start_peer("/retrieve", library).url
    output, engine = roll_out(tokenizer, library_url, *turns, **limits)
    conversation, model = converse(tokenizer, start_peer, library_url, *turns, **limits)
    assert conversation.finished
    assert [request["prompt"] for request in model.requests] == engine.inputs
    assert [request["max_tokens"] for request in model.requests] == engine.caps
    assert conversation.trajectory == trajectory(output)


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "\n",
        '{"name": "search", ',
        '"arguments": {"query_list": ["',
        '"]}}',
        "{",
        render_tool_call(["Vell"]),
        "é",
        "\\ud800",
        "<think>",
        " ",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join)


def extract(tokenizer: Any, ids: list[int]) -> list[Any]:
    parser = ToolParser.get_tool_parser(PARSER_NAME, tokenizer)
    assert isinstance(parser, SearchCallParser)
    _, calls = asyncio.run(parser.extract_tool_calls(ids))
    return calls


@given(text=TEXTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parser_finds_the_calls_that_the_method_finds(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = parse_tool_calls(tokenizer.decode(ids, skip_special_tokens=True))
    found = extract(tokenizer, ids)
    assert [call.arguments for call in found] == [call.raw for call in expected]
    judged = [parse_tool_calls(f"<tool_call>{call.arguments}</tool_call>") for call in found]
    assert judged == [[call] for call in expected]


@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parser_takes_any_ids(tokenizer: Any, ids: list[int]) -> None:
    extract(tokenizer, ids)


# --- the same task as an environment ------------------------------------------------------------------------


def as_environment(tokenizer: Any, url: str, *turns: str) -> tuple[Any, Engine]:
    """One rollout of `env=search`, on the same prompt and script."""
    taskset = SearchTaskset(
        train="", eval="", url=url, topk=2, deadline_s=2.0, response_limit=300, form="short", turns=5
    )
    taskset.name = "search"
    engine = Engine(tokenizer, *turns)

    class Model:
        def __init__(self) -> None:
            self.tokenizer = tokenizer

        async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
            output = await engine.generate(prompt_ids=prompt_ids, sampling_params={"max_tokens": max_tokens})
            return Sampled(output.token_ids, output.log_probs, len(output.token_ids) >= max_tokens)

    row = Row("q", {"question": "Ask.", "targets": ["Vell"]})
    (played,) = asyncio.run(play_row(taskset, row, Model(), EpisodeLimits(300, 400, 100)))
    return played, engine


SCRIPTS = [
    [render_tool_call(["Vell"]), "<answer>Vell</answer>"],
    [render_tool_call(["Vell", "Orrin"]) + render_tool_call(["Ostrel"]), "no answer"],
    ["<tool_call>no JSON</tool_call>", render_tool_call(["Vell"]), "<answer>Orrin</answer>"],
    ["<answer>Vell</answer>"],
    [render_tool_call(["Vell"])] * 5,
]


@pytest.mark.parametrize("turns", SCRIPTS)
def test_the_search_environment_plays_the_ids_of_the_search_loop_and_gives_the_solvers_reward(
    tokenizer: Any, start_peer: StartPeer, turns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start_peer("/retrieve", library).url
    monkeypatch.setattr(sys.modules[__name__], "PROMPT", solver_messages("Ask.", "short", 5))
    output, loop_engine = roll_out(tokenizer, url, *turns)
    played, engine = as_environment(tokenizer, url, *turns)
    assert engine.inputs == loop_engine.inputs
    assert (played.prompt_ids, played.response_ids) == (output.prompt_ids, output.response_ids)
    assert played.response_mask == output.response_mask and played.token_drift == 0
    assert played.score is not None
    assert played.score.reward == solver_reward(trajectory(output), ["Vell"]).score


def test_a_search_that_the_service_does_not_answer_spoils_the_environments_episode(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    played, _ = as_environment(
        tokenizer, f"http://127.0.0.1:{unused_port()}", render_tool_call(["Vell"]), FINAL
    )
    assert played.score is None
    assert played.fault is not None and "Episode.respond raised SearchUnavailable" in played.fault
