"""However many rows an agent's episode has, it weighs the same in the loss, and a failed one nothing."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transfer_queue as tq
from agent_loops import EPISODES, Engine, run_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import NonTensorData, TensorDict
from told_model import Told
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass

from drzero.players.gateway.rows import played_rows
from drzero.players.gateway.session import AgentSession
from drzero.recipe.compose import compose_plain, resolve
from environments.conversation import Conversation
from environments.score import Score
from verl_ext.apis.turn import Asked
from verl_ext.episodes import EpisodeLimits
from verl_ext.method.advantages import call_advantages
from verl_ext.rollout.environment_agent_loop import EnvironmentAgentLoop, reward_fields
from verl_ext.trainer.policy_loss import BYPASS_MODE, bypass_mode_loss
from verl_ext.trainer.step_rows import StepRow, read_rows
from verl_ext.trainer.trainers import ENVIRONMENT, GroupRelativeTrainer

LIMITS = EpisodeLimits(prompt_tokens=256, response_tokens=4096, tokens_per_turn=64)
MOST = 7  # calls of an episode


@pytest.fixture(scope="module")
def actor():
    config = resolve(compose_plain("train", ["hardware=cpu", "environment=wordle"])).actor_rollout_ref.actor
    assert (config.loss_agg_mode, config.policy_loss.loss_mode) == ("token-mean", BYPASS_MODE)
    return omega_conf_to_dataclass(config)


# Which earlier call each call goes on from: 0 for none, a new conversation.
shapes = st.integers(1, MOST).flatmap(lambda n: st.tuples(*(st.integers(0, call) for call in range(n))))
rewards = st.one_of(st.none(), st.floats(-1, 2), st.just("by call"))
groups = st.lists(st.tuples(shapes, rewards), min_size=1, max_size=4)


def session_of(shape, tokenizer):
    """The calls of an episode of this shape, by the gateway's own session."""
    lines = (f"{number} and on" * (1 + number % 3) for number in range(len(shape)))  # no two are alike
    session = AgentSession(Told(tokenizer, *lines), LIMITS, MOST)

    async def ask():
        for number, earlier in enumerate(shape):
            asked = [{"role": "user", "content": f"start {number}"}]
            if earlier:
                before = session.calls[earlier - 1]
                heard = {"role": "assistant", "content": before.answer.text}
                asked = [*before.asked.messages, heard, {"role": "user", "content": f"next {number}"}]
            await session.ask(Asked(tuple(asked)))

    asyncio.run(ask())
    assert [0 if call.extends is None else call.extends + 1 for call in session.calls] == list(shape)
    return session


def step_row(key, played):
    row = StepRow(key, False, "agent", {"row": key}, reward_fields([played]), Conversation(), 0)
    return replace(row, agent=played.agent)


def of_one_row(session, played):
    """The same episode with all its sampled tokens in one row."""
    places, end = {}, 0
    for call in session.calls:
        places[call.number] = (end, end + len(call.sampled.ids))
        end += len(call.sampled.ids)
    agent = {**played.extra["agent"], "places": places}
    return replace(played, response_mask=[1] * end, extra={"agent": agent})


def step_of(group, tokenizer):
    """(row, names of its tokens) as the gateway makes them, and with one row an episode."""
    as_made, as_one = [], []
    for number, (shape, reward) in enumerate(group):
        session = session_of(shape, tokenizer)
        rows = played_rows(session)
        for played in rows:
            if reward == "by call":
                played.extra["agent"]["rewards"] = [call.number % 3 / 2 for call in session.calls]
            paid = math.fsum(played.extra["agent"].get("rewards", [reward or 0.0]))
            played.score = None if reward is None else Score(paid, False)
        one = of_one_row(session, rows[0])
        for made, some in ((as_made, rows), (as_one, [one])):
            for place, played in enumerate(some):
                row = step_row(f"p_{number}_{place}", played)
                made.append((row, played.response_mask, tokens_of(number, row, len(played.response_mask))))
    return as_made, as_one


def tokens_of(episode, row, length):
    """Which sampled token stands at each place, as (episode, call, place in the call)."""
    names = [None] * length
    for call, (start, stop) in row.agent["places"].items():
        names[start:stop] = [(episode, int(call), place) for place in range(stop - start)]
    return names


def trained(step, tokens, actor, mode=None):
    """Loss and gradients by token, of log-probs that differ from token to token."""
    rows = [row for row, _, _ in step]
    trainer = SimpleNamespace(method=ENVIRONMENT, config=OmegaConf.create({}))
    for name in ("_compared", "_pay_by_call"):
        setattr(trainer, name, getattr(GroupRelativeTrainer, name).__get__(trainer))
    masks = [torch.tensor(mask) for _, mask, _ in step]
    scores = [row.reward["score"] for row in rows]
    _, advantages, masks = GroupRelativeTrainer._per_token(trainer, scores, masks, rows)
    place_of = {name: place for place, name in enumerate(tokens)}
    log_probs = (-1 - torch.arange(len(tokens)) % 7 / 5).requires_grad_()
    old = -1 - torch.arange(len(tokens)) % 5 / 4
    # The ids of prompts and of rows before have log-probs too, which must not matter.
    of_rows = [[place_of.get(name, 0) for name in names] for _, _, names in step]
    width = max(map(len, of_rows))
    index = torch.tensor([places + [0] * (width - len(places)) for places in of_rows])
    mask = torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in masks]).bool()
    values = torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in advantages])
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask.sum()) or None, global_batch_size=len(rows)
    )
    loss, _ = bypass_mode_loss(
        **{"old_log_prob": old[index], "log_prob": log_probs[index], "advantages": values},
        **{"response_mask": mask, "loss_agg_mode": mode or actor.loss_agg_mode, "config": actor},
    )
    loss.backward()
    names = [names[place] for _, _, names in step for place in range(len(names))]
    in_loss = [name for name, kept in zip(names, torch.cat(masks).tolist(), strict=True) if kept]
    return float(loss.detach()), log_probs.grad, in_loss


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(group=groups)
def test_an_episode_weighs_the_same_in_one_row_and_in_many(group, tokenizer, actor):
    as_made, as_one = step_of(group, tokenizer)
    tokens = [name for _, _, names in as_one for name in names]
    loss, gradient, in_loss = trained(as_made, tokens, actor)
    loss_of_one, gradient_of_one, _ = trained(as_one, tokens, actor)
    counting = {number for number, (_, reward) in enumerate(group) if reward is not None}
    assert sorted(in_loss) == sorted(name for name in tokens if name[0] in counting)
    assert loss == pytest.approx(loss_of_one, abs=1e-6)
    torch.testing.assert_close(gradient, gradient_of_one, rtol=1e-5, atol=1e-7)
    failed = torch.tensor([name[0] not in counting for name in tokens])
    assert not gradient[failed].any()


def test_a_mean_over_rows_would_weigh_an_episode_by_its_rows(tokenizer, actor):
    as_made, as_one = step_of([((0, 0, 0), 1.0), ((0,), 0.0)], tokenizer)
    tokens = [name for _, _, names in as_one for name in names]
    loss, _, _ = trained(as_made, tokens, actor, "seq-mean-token-mean")
    loss_of_one, _, _ = trained(as_one, tokens, actor, "seq-mean-token-mean")
    assert abs(loss - loss_of_one) > 0.01


BRANCHES = """
from openai import AsyncOpenAI

async def agent(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    opening, rewards = [{"role": "user", "content": task["question"]}], []

    async def said(messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        rewards.append(float(len(answer.choices[0].message.content)))
        return {"role": "assistant", "content": answer.choices[0].message.content}

    opening.append(await said(opening))
    for way in ("left", "right", "left again"):
        await said([*opening, {"role": "user", "content": way}])
    return rewards
"""
SAID = [("a", "bb and on", "c", "ddd"), ("ee", "f", "gg and on", "h")]


def trainer_of(batch, n, mini):
    trainer = object.__new__(get_trainer_cls("drzero_environment_sync"))
    actor = {"ppo_mini_batch_size": mini, "calculate_entropy": False, "entropy_coeff": 0.0, "ppo_epochs": 1}
    actor |= {"data_loader_seed": 1, "shuffle": False}
    told = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": n, "temperature": 1.0}}}
    told |= {"data": {"train_batch_size": batch}, "trainer": {"critic_warmup": 0}}
    trainer.config = OmegaConf.create(told)
    trainer.global_steps, trainer.parameter_sync_step, trainer.use_critic = 1, 1, False
    trainer._heartbeat, trainer.actor_rollout_wg = Mock(), Mock(_dispatch_info={"actor": [0]})
    trainer.actor_rollout_wg.update_actor.return_value = TensorDict({"metrics": NonTensorData({"mfu": 1.0})})
    return trainer


def rolled_out(tokenizer, folder, said):
    return run_loop(
        EnvironmentAgentLoop,
        {"prompt_length": 300, "response_length": 300},
        Engine(tokenizer, *said),
        tokenizer,
        {"extra_info": {"row": "train-0", "task": json.dumps({"task": {"question": "Which way?"}})}},
        **{"environment": f"agent:{folder}/own.py:agent", "folder": None, "max_tokens_per_turn": 64},
        **{"options": {"data": str(folder / "tasks.jsonl")}, **EPISODES},
    )


def test_each_call_is_credited_in_its_own_row_on_veRLs_way_to_the_update(tokenizer, queue, tmp_path):
    (tmp_path / "own.py").write_text(BRANCHES)
    (tmp_path / "tasks.jsonl").write_text('{"question": "Which way?"}')
    worker = object.__new__(AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.processor, worker.reward_loop_worker_handles, worker.distillation_enabled = None, None, False
    given = {"uid": "branches", "global_steps": 1, "data_source": "agent", "extra_info": {}}
    given["reward_model"] = {"ground_truth": {"target": None}}
    for session, said in enumerate(SAID):
        outputs = rolled_out(tokenizer, tmp_path, said)
        assert [[*one.extra_fields["agent"]["places"]] for one in outputs] == [["0", "1"], ["2"], ["3"]]
        asyncio.run(worker._agent_loop_postprocess(outputs, False, session_id=session, **given))
    keys = [f"branches_{session}_{place}" for session in range(2) for place in range(3)]
    batch = KVBatchMeta(keys=keys, tags=[{"seq_len": 30}] * 6, partition_id="train")

    trainer = trainer_of(batch=2, n=2, mini=2)
    trainer.tokenizer = tokenizer
    batch = trainer._balance_batch(batch, {})
    rows = read_rows(batch)
    assert [row.padding for row in rows].count(True) == 2
    trainer._advantages(batch, {}, rows)
    fields = ["advantages", "loss_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)
    paid = call_advantages([[float(len(text)) for text in said] for said in SAID], ["branches"] * 2)
    tokens = 0
    for row, advantages, mask in zip(rows, *(data[name].unbind() for name in fields), strict=True):
        places = {} if row.padding else row.agent["places"]
        expected = torch.zeros_like(advantages)
        for number, (start, stop) in places.items():
            expected[start:stop] = float(paid[int(row.rollout[-1])][int(number)])
            tokens += stop - start
        assert torch.equal(advantages, expected) and mask.sum() == sum(b - a for a, b in places.values())
    assert tokens == sum(call["tokens"] for row in (rows[0], rows[3]) for call in row.agent["calls"])


@pytest.mark.parametrize(("rows", "padded", "updates"), [(7, 8, 2), (8, 8, 2), (9, 16, 2), (17, 24, 2)])
def test_more_rows_make_an_update_larger_and_not_another_one(rows, padded, updates):
    trainer = trainer_of(batch=4, n=2, mini=2)
    multiple = trainer._get_required_batch_multiple(dp_size=2)
    length = -(-rows // multiple) * multiple
    batch = KVBatchMeta(keys=[str(row) for row in range(length)], tags=[{}] * length, partition_id="train")
    trainer._update_actor(batch, {})
    assert length == padded and batch.extra_info["mini_batch_size"] * updates == padded
    assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
