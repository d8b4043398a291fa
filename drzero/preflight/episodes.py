"""Checks of a stage's environment: its rows, their length, and an episode without a model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from omegaconf import DictConfig

from drzero.ops.hub import HUB_ID
from drzero.preflight.batch import fills_batch
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.preflight.growth import CHANGE_TEMPLATE, growth_fault, tools_fault
from drzero.preflight.models import is_out_of_reach
from drzero.recipe.environment import limits_of, opening_tokens, opening_tools, play_silent, rows_of
from environments.agent.load import is_class, load_agent, load_items
from environments.agent.taskset import AgentTaskset
from environments.call import ToolSchema
from environments.conversation import Conversation, Message
from environments.fault import SAME_PACKAGES, EnvironmentUnusable
from environments.row import Row
from environments.taskset import Taskset

ENV = "environment.name"
_OPENED = 32
_BY_TOKEN = ("token-mean", "token-sum")
_BY_ROW = ("gspo", "sapo", "geo_mean")  # these losses average over rows, whatever loss_agg_mode says
_LOSS, _AGGREGATION, _MINI = (
    f"actor_rollout_ref.actor.{name}"
    for name in ("policy_loss.loss_mode", "loss_agg_mode", "ppo_mini_batch_size")
)


def check_environment(ctx: CheckContext) -> Iterator[Finding]:
    """The environment must load, have rows, and play an episode whose first messages fit."""
    config = ctx.config
    try:
        taskset = ctx.taskset()
    except EnvironmentUnusable as reason:
        if ctx.starting or ctx.machine.is_local or not config.environment.name:
            raise
        name = config.environment.name.partition(":")[2] or config.environment.name
        if SAME_PACKAGES in os.environ:
            fix = f"if a package brings it, name it in a run file (image: {{pip: [{name}]}}, --config-path)"
            yield error(ENV, str(reason), fix)
        else:
            yield warning(ENV, f"{reason} (here, but the run is for another machine)", "install it there")
        return
    if ctx.trains:
        if taskset.player != Taskset.player:
            yield from _weighs_episodes_alike(config)
        rows = rows_of(taskset, "train", config.train_rows, config.data.seed)
        yield from fills_batch(
            config, "the environment", len(rows), "make the batch smaller, or train_rows larger"
        )
        yield from _is_held_out(ctx, rows)
    else:
        rows = rows_of(taskset, "eval", config.num_examples, config.data.seed)
        if config.num_examples and len(rows) < config.num_examples:
            why = f"{taskset.name} has {len(rows)} held-out rows, and num_examples={config.num_examples}"
            yield warning("num_examples", why, "all of them are played")
    yield from _plays(ctx, rows)


def _weighs_episodes_alike(config: DictConfig) -> Iterator[Finding]:
    """Its episodes may have several rows: the loss must not count rows, nor an update take a part of them."""
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    why = "it averages over rows, so an episode of this environment would weigh by how many rows it has"
    if actor.loss_agg_mode not in _BY_TOKEN:
        yield error(_AGGREGATION, why, f"use {_BY_TOKEN[0]}")
    if actor.policy_loss.loss_mode in _BY_ROW:
        yield error(_LOSS, why, "leave it as it is in the recipe")
    is_whole = actor.ppo_mini_batch_size == batch or config.trainer.v1.trainer_mode.endswith("separate_async")
    if not is_whole:
        why = f"a step's {batch} tasks would be cut into updates by rows, and an episode may have several"
        yield error(_MINI, why, f"set it to data.train_batch_size={batch}, for one update a step")


def check_agent(ctx: CheckContext) -> None:
    """An agent of your own and its items must load. Raises EnvironmentUnusable."""
    config = ctx.config
    if config.agent and is_class(config.agent):
        load_agent(config.agent, dict(config.agent_options))
        if config.tasks:
            load_items(Path(config.tasks))


def _is_held_out(ctx: CheckContext, rows: list[Row]) -> Iterator[Finding]:
    config, taskset = ctx.config, ctx.taskset()
    validates = config.trainer.test_freq > 0 or config.trainer.val_before_train
    try:
        held_out = rows_of(taskset, "eval", None, config.data.seed)
    except EnvironmentUnusable as reason:
        if validates:
            yield error(
                "val_rows", str(reason), "set trainer.test_freq=-1 and trainer.val_before_train=false"
            )
        else:
            yield warning(ENV, f"{reason}: it cannot be evaluated on unseen rows", "")
        return
    trained = {_task(row) for row in rows}
    both = sum(_task(row) in trained for row in held_out)
    if both:
        why = f"{both} of {len(held_out)} rows of the split eval are also in the split train"
        yield warning(ENV, why, "an evaluation on them measures memory")


def _task(row: Row) -> str:
    """A row's task, without the name of its split."""
    return str(sorted((name, value) for name, value in row.data.items() if name != "split"))


def _plays(ctx: CheckContext, rows: list[Row]) -> Iterator[Finding]:
    config, taskset = ctx.config, ctx.taskset()
    model = config.tokenizer if ctx.stage == "evaluate" and config.endpoint else ctx.model_played
    if model is None:  # check_endpoint reports the missing tokenizer
        return
    if HUB_ID.fullmatch(str(model)) and is_out_of_reach(str(model)):
        why = f"no episode was played, because the tokenizer of {model} is out of reach here"
        yield warning(ENV, why, "also run preflight where the hub answers")
        return
    tokenizer = ctx.load_tokenizer(str(model), ENV)
    try:
        limits = limits_of(config, tokenizer)
    except ValueError as reason:
        form = "name the form, such as environment.call_form=hermes, if the model can write calls in it"
        yield error("environment.call_form", f"the model at {model}: {reason}", form)
        return
    played = play_silent(taskset, rows[0], tokenizer, limits)
    if played.fault is not None and isinstance(taskset, AgentTaskset):
        # A model that says nothing may well end an agent. A real one tells.
        fix = f"try it first: drzero serve-model, then drzero agent-bench {taskset.agent.name} tasks=…"
        yield warning(ENV, f"with a model that says nothing, the agent fails: {played.fault}", fix)
        return
    if played.fault is not None:
        fix = "correct the environment"
        if "chat template" in played.fault:
            fix += f", such as a system message, or {CHANGE_TEMPLATE}"
        yield error(ENV, f"an episode without a model fails: {played.fault}", fix)
        return
    assert played.score is not None
    turns = len(played.conversation.turns)
    parts = ", ".join(f"{name} {value:g}" for name, value in played.score.parts.items())
    yield note(
        ENV,
        f"{taskset.name}: {len(rows)} rows; {len(played.prompt_ids)} tokens at the start; saying nothing "
        f"earns {played.score.reward:g}{f' ({parts})' if parts else ''} after {turns} turns",
    )
    if played.score.success:
        yield warning(ENV, "saying nothing solves the task", "is its score right?")
    if taskset.player == Taskset.player:
        yield from _grows(ctx, played.conversation, opening_tools(taskset, rows[0]), tokenizer)
        yield from _prompts_fit(ctx, rows[:: max(1, len(rows) // _OPENED)][:_OPENED], tokenizer)


def _grows(
    ctx: CheckContext, played: Conversation, tools: list[ToolSchema], tokenizer: Any
) -> Iterator[Finding]:
    """The model's chat template must not rewrite an episode's earlier messages."""
    messages: list[Message] = [*played.opening]
    for turn in played.turns:
        messages += [{"role": "assistant", "content": "text"}, *turn.answers]
    try:
        fault = growth_fault(tokenizer, messages, tools or None)
        fault = fault or (tools_fault(tokenizer, played.opening, tools) if tools else None)
    except (ValueError, TypeError, TemplateError) as reason:  # of templates: raise_exception, None + text
        fault = str(reason)
    if fault:
        why = f"{ctx.taskset().name} cannot be played with {tokenizer.name_or_path}: {fault}"
        yield error(ENV, why, CHANGE_TEMPLATE)


def _prompts_fit(ctx: CheckContext, rows: list[Row], tokenizer: Any) -> Iterator[Finding]:
    config, taskset = ctx.config, ctx.taskset()
    limit = config.data.max_prompt_length
    long = [tokens for row in rows if (tokens := opening_tokens(taskset, row, tokenizer)) > limit]
    if long:
        finding = error if len(long) > config.run.max_failed_share * len(rows) else warning
        why = f"the first messages of {len(long)} of {len(rows)} rows are longer, up to {max(long)} tokens"
        fix = f"such an episode fails: set it to {max(long)} or more"
        yield finding("data.max_prompt_length", why, fix)
