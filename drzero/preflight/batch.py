"""Checks of engines, devices, lengths and batches, by rules that veRL 0.9.1 applies only in its workers.

With B = data.train_batch_size × rollout.n rows a step, M = ppo_mini_batch_size × rollout.n rows an update, dp
data-parallel ranks (devices over Ulysses' sequence parallelism) and m rows a micro-batch: dp must divide M
(engine_workers.py), m must divide M / dp (engine/utils.py), devices must divide B (utils/config.py), and M
should divide B, or veRL pads the batch (trainer_base.py).
"""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from drzero.ops.text import counted
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, warning
from drzero.preflight.memory_ledger import SHARING, sequence_parallel
from drzero.recipe.gpu_split import SERVE_GPUS, pools
from verl_ext.sglang.compat import OWN_POSITIONS

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_MODE = "trainer.v1.trainer_mode"
_BATCH, _MINI = "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
MICRO_BATCH, TOKENS = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"
"""The size of a micro-batch, in rows or in tokens."""
_VLLM_ON_CPU = ("vLLM samples on a GPU here", "use rollout=reference, or rollout=sglang")
_LOG_PROB = "log_prob_micro_batch_size_per_gpu"


def check_engines(ctx: CheckContext) -> Iterator[Finding]:
    """The chosen engines must exist and support the config."""
    config = ctx.config
    if ctx.serves_model and config.solver.engine == "vllm" and config.machine.device == "cpu":
        yield error("solver.engine", *_VLLM_ON_CPU)
    if not ctx.trains:
        return
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name not in ("sglang", "vllm", "reference"):
        why = f"there is no rollout engine {rollout.name!r} here"
        yield error(f"{_ROLLOUT}.name", why, "choose sglang, vllm, or reference on a CPU or one GPU")
    if rollout.name == "vllm" and config.machine.device == "cpu":
        yield error(f"{_ROLLOUT}.name", *_VLLM_ON_CPU)
    if model.lora_rank > 0 and not model.lora.merge:
        yield from _adapters(rollout.name, config.machine.device)
    if config.machine.device == "cpu" and config.actor_rollout_ref.actor.use_kl_loss:
        why = "veRL holds the reference model in pinned memory, which needs a GPU"
        yield error(
            f"{_ACTOR}.use_kl_loss", why, "set it to false (the published challenger has no KL either)"
        )
    if rollout.name == "reference" and config.trainer.v1.trainer_mode.endswith("async"):
        fix = f"{_in_sync(config)}, or use rollout=sglang"
        yield error(_MODE, "the reference engine has no partial rollouts", fix)


def _in_sync(config: DictConfig) -> str:
    """What to change for training and sampling in turn."""
    return "use mode=sync" if config.machine.serve_gpus is None else f"leave {SERVE_GPUS} out"


def check_filter(ctx: CheckContext) -> Iterator[Finding]:
    """Filter groups only by a score that failures do not have."""
    chosen = ctx.config.algorithm.filter_groups
    if not chosen.enable:
        return
    if ctx.stage == "challenger":
        why = "questions have no score to filter them by, and are compared across prompts"
        yield error("algorithm.filter_groups.enable", why, "leave it false, or set it for the solver")
    elif chosen.metric != "filter_score":
        why = (
            f"{chosen.metric} is 0 for an answer spoiled by a failed service too: with a service down, all "
            "questions would be replaced for ever, and no failure counted"
        )
        yield error("algorithm.filter_groups.metric", why, "leave it at filter_score")


def _adapters(engine: str, device: str) -> Iterator[Finding]:
    key = "actor_rollout_ref.model.lora.merge"
    if engine == "reference":
        yield error(key, "the reference engine takes merged weights, not adapters", f"set {key}=true")
    elif device == "cpu":
        why = "SGLang holds adapters in pinned memory, which needs a GPU"
        yield error(key, why, f"set {key}=true")


def check_parallel(ctx: CheckContext) -> Iterator[Finding]:
    """Parallel sizes must fit the devices and the models' heads."""
    config, solver, per_node = ctx.config, ctx.config.solver, ctx.config.machine.gpus
    if ctx.trains:
        yield from _rollout_parallel(ctx, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if not ctx.serves_model or solver.engine not in SHARING or config.machine.device == "cpu":
        return
    used = solver.tp_size * solver.dp_size
    if used > per_node:
        yield error(
            "solver.dp_size",
            f"the solver's server needs tp {solver.tp_size} × dp {solver.dp_size} = {counted(used, 'GPU')}, "
            f"and a machine has {per_node}",
            f"set solver.dp_size={max(1, per_node // solver.tp_size)}"
            + (f" and solver.tp_size={per_node}" if solver.tp_size > per_node else ""),
        )
    elif used < per_node:
        why = f"the solver's server uses {used} of {counted(per_node, 'GPU')}"
        yield warning("solver.dp_size", why, f"set solver.dp_size={per_node // solver.tp_size}")
    yield from _heads(ctx, solver.model_path, "solver.tp_size", solver.tp_size)


def _rollout_parallel(ctx: CheckContext, devices: int) -> Iterator[Finding]:
    rollout = ctx.config.actor_rollout_ref.rollout
    key, tp = f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    group = tp * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    dp, engine_kwargs = rollout.data_parallel_size, rollout.engine_kwargs.get("sglang") or {}
    if rollout.name == "sglang" and dp > 1 and not engine_kwargs.get("enable_dp_attention"):
        yield error(
            f"{_ROLLOUT}.data_parallel_size",
            f"each SGLang would be started with tp {tp * dp} × dp {dp}, which crashes: veRL makes the "
            f"{devices // tp} engines of tp {tp} itself, from {counted(devices, 'GPU')}",
            f"set {_ROLLOUT}.data_parallel_size=1; for data-parallel attention within an engine set "
            f"+{_ROLLOUT}.engine_kwargs.sglang.enable_dp_attention=true as well",
        )
        return
    if rollout.name == "reference" and group != 1:
        yield error(key, "the reference engine works on one device", f"set {key}=1")
    elif len(counts := pools(ctx.config)) > 1 and any(number % group for number in counts):
        why = f"{counts[0]} GPUs train and {counts[1]} only sample, and an engine takes {group}"
        yield error(key, why, f"choose {SERVE_GPUS} so that {group} divides both, or lower {key}")
    elif devices % group:
        yield error(
            key,
            f"{devices} devices (trainer.n_gpus_per_node × nnodes) cannot be divided into engines of {group}",
            f"set {key} to a divisor of {devices}",
        )
    elif ctx.config.trainer.n_gpus_per_node % group:
        why = f"an engine of {group} GPUs would span machines of {ctx.config.trainer.n_gpus_per_node}"
        fix = f"set {key} to a divisor of {ctx.config.trainer.n_gpus_per_node}"
        yield error(key, why, fix)
    yield from _heads(ctx, ctx.config.actor_rollout_ref.model.path, key, tp)
    if devices % (sp := sequence_parallel(ctx.config)):
        key = f"{_ACTOR}.ulysses_sequence_parallel_size"
        yield error(key, f"{devices} devices cannot be divided by {sp}", "choose a divisor")


def _heads(ctx: CheckContext, model: str, key: str, tp: int) -> Iterator[Finding]:
    shape = ctx.shape(model)
    if shape is not None and shape.heads % tp:
        why = f"the {shape.heads} attention heads of {model} cannot be split in {tp}"
        yield error(key, why, "choose a divisor of them")


def check_lengths(ctx: CheckContext) -> Iterator[Finding]:
    """A conversation must fit the model and the engine, and a turn the response."""
    config = ctx.config
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    if shape and shape.context and longest > shape.context:
        yield error(
            "data.max_response_length",
            f"prompt and response of {longest} tokens (data.max_prompt_length + data.max_response_length) "
            f"are more than the {shape.context} positions of {config.actor_rollout_ref.model.path}",
            "shorten one of them, or choose a model with a longer context",
        )
    limit = rollout.max_model_len
    if limit is not None and limit < longest + (rollout.name == "sglang"):
        yield error(
            "actor_rollout_ref.rollout.max_model_len",
            f"the rollout engine takes {limit} tokens, and a conversation may have {longest} (SGLang "
            "reserves one more)",
            f"leave it unset, or set it to {longest + 1} at least",
        )
    if rollout.name == "vllm" and limit is not None and shape and shape.context and limit > shape.context:
        why = f"veRL refuses a vLLM of {limit} tokens for a model of {shape.context} positions"
        yield error(f"{_ROLLOUT}.max_model_len", why, f"set it to {shape.context}")
    if config.rollout.max_tokens_per_turn > config.data.max_response_length:
        yield error(
            "rollout.max_tokens_per_turn",
            f"one turn may be longer than the whole response (data.max_response_length="
            f"{config.data.max_response_length}), which then ends before a tool answers",
            "make it a third of the response or less",
        )
    if rollout.multi_turn.max_tool_response_length <= config.retrieval.response_limit:
        yield error(
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
            f"veRL would cut the middle out of tool responses of up to retrieval.response_limit="
            f"{config.retrieval.response_limit} characters",
            "leave it as it is in the recipe, one above that limit",
        )


def check_served_lengths(ctx: CheckContext) -> Iterator[Finding]:
    """A conversation must fit the served model, and a turn and a tool response the conversation."""
    config, solver = ctx.config, ctx.config.solver
    if not ctx.serves_model:
        return
    shape = ctx.shape(solver.model_path)
    context = max(shape.context, shape.stretched_context) if shape else 0
    own = OWN_POSITIONS if solver.engine == "sglang" else 0
    if shape and context and solver.max_context_tokens + own > context:
        kept = f", of which SGLang reserves {own}" if own else ""
        yield error(
            "solver.max_context_tokens",
            f"conversations of {solver.max_context_tokens} tokens are more than the {context} positions of "
            f"{solver.model_path}{kept}",
            f"set it to {context - own} at most",
        )
    if solver.max_tokens_per_turn >= solver.max_context_tokens:
        yield error(
            "solver.max_tokens_per_turn",
            f"one turn may fill all of solver.max_context_tokens={solver.max_context_tokens}, the prompt too",
            "make it a third of that or less",
        )
    passages = config.retrieval.response_limit / 4
    if solver.max_tokens_per_turn < solver.max_context_tokens <= solver.max_tokens_per_turn + passages:
        yield error(
            "solver.max_context_tokens",
            f"a turn of {solver.max_tokens_per_turn} tokens and a tool response of about {passages:.0f} "
            "leave no room for the prompt and an answer",
            f"set it to {2 * solver.max_tokens_per_turn + 2 * passages:.0f} at least",
        )
    elif passages > solver.max_context_tokens / 2:
        yield warning(
            "retrieval.response_limit",
            f"one tool response may take about {passages:.0f} of the {solver.max_context_tokens} tokens of a "
            "conversation",
            "lower it, or raise solver.max_context_tokens",
        )


def micro_batch_key(config: DictConfig) -> str:
    """The key that sets the size of the actor's micro-batches."""
    return TOKENS if config.actor_rollout_ref.actor.use_dynamic_bsz else MICRO_BATCH


def longest_row(config: DictConfig) -> int:
    """Tokens of a prompt and a response, at most."""
    return int(config.data.max_prompt_length + config.data.max_response_length)


def smallest_micro_batch(config: DictConfig) -> int:
    """The least value of `micro_batch_key`: one row, in its own unit."""
    return longest_row(config) if config.actor_rollout_ref.actor.use_dynamic_bsz else 1


def check_micro_batches(ctx: CheckContext) -> Iterator[Finding]:
    """The size of every micro-batch must be set, in tokens or in rows per GPU."""
    config = ctx.config.actor_rollout_ref
    if config.actor.use_dynamic_bsz:
        yield from _token_budgets(ctx.config)
        return
    needed = [(_ACTOR, "ppo_micro_batch_size"), (_ROLLOUT, "log_prob_micro_batch_size")]
    if config.actor.use_kl_loss or ctx.config.algorithm.use_kl_in_reward:
        needed.append((_REF, "log_prob_micro_batch_size"))
    for node, name in needed:
        settings, key = OmegaConf.select(ctx.config, node), f"{node}.{name}_per_gpu"
        size = settings[f"{name}_per_gpu"]
        if settings[name] is not None:
            why = f"{name} is veRL's old key for all GPUs together"
            yield error(f"{node}.{name}", why, f"set {key} alone")
        elif size is None:
            why = f"is not set: veRL stops with 'Please set {name}_per_gpu'"
            yield error(key, why, f"write {key}=2 (no + before it)")
        elif not isinstance(size, int) or size < 1:
            yield error(key, f"is {size!r}, not a whole number above 0", f"write {key}=2")


def _token_budgets(config: DictConfig) -> Iterator[Finding]:
    """Micro-batches by tokens must hold the longest row, and have no other size."""
    longest, parts = longest_row(config), config.actor_rollout_ref
    budgets = {TOKENS: parts.actor.ppo_max_token_len_per_gpu}
    if not config.algorithm.rollout_correction.bypass_mode:
        budgets[f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"] = parts.rollout.log_prob_max_token_len_per_gpu
    for key, tokens in budgets.items():
        if tokens * sequence_parallel(config) < longest:
            why = f"a sequence may have {longest} tokens (prompt and response), but a micro-batch {tokens}"
            yield error(key, why, f"raise it to {longest} at least")
    rows = {
        MICRO_BATCH: parts.actor.ppo_micro_batch_size_per_gpu,
        f"{_ROLLOUT}.{_LOG_PROB}": parts.rollout[_LOG_PROB],
    }
    for key, size in rows.items():
        if size is not None:
            why = "has no effect: micro-batches are filled up to a number of tokens here"
            fix = f"set {TOKENS} instead, or {_ACTOR}.use_dynamic_bsz=false as well"
            yield error(key, why, fix, value=size)


def fills_batch(
    config: DictConfig, source: Path | str, rows: int, advice: str, dropped: int = 0
) -> Iterator[Finding]:
    """A source's rows, without those `dropped`, must fill a batch, and the epochs must cover all steps."""
    batch = config.data.train_batch_size
    if dropped:
        source, rows = f"{source}, without the {dropped} that are too long,", rows - dropped
    if rows < batch:
        why = f"{source} has {rows} rows, less than one batch ({_BATCH}={batch})"
        yield error(_BATCH, why, advice)
    most, steps = config.data.train_max_samples, config.trainer.total_training_steps
    used = min(rows, most) if most > 0 else rows
    reached = used // batch * config.trainer.total_epochs  # veRL ends the run at whichever comes first
    if 0 < most < batch:
        why = f"less than one batch ({_BATCH}={batch})"
        yield error("data.train_max_samples", why, "raise it, or leave it out")
    elif 0 < reached < steps:
        why = f"veRL would end the run at step {reached} of {steps}"
        yield error("trainer.total_epochs", why, "leave it out: trainer.total_training_steps ends a run")


def check_batch(ctx: CheckContext) -> Iterator[Finding]:
    """The batch must divide over updates, devices and micro-batches."""
    config = ctx.config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch < mini:
        why = f"an update of {mini} prompts is larger than the batch of {batch}"
        yield error(_MINI, why, f"set it to {batch} at most")
    elif batch % mini:
        yield warning(
            _MINI,
            f"{_BATCH}={batch} is no multiple of it: veRL fills the last update up with rows that train "
            "nothing",
            "choose a divisor of the batch",
        )
    ranks = max(1, config.trainer.n_gpus_per_node * config.trainer.nnodes // sequence_parallel(config))
    unit = 1 if actor.use_dynamic_bsz else int(actor.ppo_micro_batch_size_per_gpu or 1)
    for key, name, prompts in ((_BATCH, _BATCH, batch), (_MINI, "ppo_mini_batch_size", mini)):
        rows = prompts * rollout.n
        if rows % (unit * ranks):
            of = f"ppo_micro_batch_size_per_gpu × devices = {unit} × {ranks} = {unit * ranks}"
            of = f"the {ranks} devices" if actor.use_dynamic_bsz else of
            yield error(key, f"{name} × rollout.n = {rows} is no multiple of {of}", "change one of them")
            break
    # The log-probability micro-batch counts only in runs that recompute log-probabilities.
    unit = (rollout[_LOG_PROB] or 1) * ranks
    recomputes = not (config.algorithm.rollout_correction.bypass_mode or rollout.log_prob_use_dynamic_bsz)
    if recomputes and batch * rollout.n % unit:
        why = f"{_BATCH} × rollout.n = {batch * rollout.n} is no multiple of {_LOG_PROB} × devices = {unit}"
        yield error(f"{_ROLLOUT}.{_LOG_PROB}", why, "change one of them")


def check_separate_async(ctx: CheckContext) -> Iterator[Finding]:
    """separate_async has further rules for batch and devices."""
    config = ctx.config
    if not config.trainer.v1.trainer_mode.endswith("separate_async"):
        return
    rollout, steps = config.actor_rollout_ref.rollout, config.trainer.v1.separate_async.parameter_sync_step
    mini, batch = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.data.train_batch_size
    if batch != steps * mini:
        yield error(
            "trainer.v1.separate_async.parameter_sync_step",
            f"separate_async wants {_BATCH}={batch} to be parameter_sync_step × ppo_mini_batch_size = "
            f"{steps * mini}",
            "change one of them",
        )
    if not (rollout.nnodes and rollout.n_gpus_per_node):
        why = "separate_async needs GPUs of their own for the rollouts"
        half = max(1, config.machine.gpus // 2)
        yield error(f"{_ROLLOUT}.nnodes", why, f"set {SERVE_GPUS}={half} instead of mode= (docs/machines.md)")
    if rollout.checkpoint_engine.backend == "naive":
        why = "separate_async sends weights between GPUs, which naive cannot"
        yield error(f"{_ROLLOUT}.checkpoint_engine.backend", why, "set it to nccl")


def check_on_policy(ctx: CheckContext) -> Iterator[Finding]:
    """HRPO is on-policy: training on rollouts of an older policy needs allow_off_policy=true."""
    config = ctx.config
    if config.method != "hrpo" or config.allow_off_policy:
        return
    mode = config.trainer.v1.trainer_mode
    if mode != "drzero_hrpo_sync":
        why = f"trainer mode {mode} trains on questions of an older policy, and HRPO is on-policy"
        yield error(_MODE, why, f"{_in_sync(config)}, or set allow_off_policy=true")
    for key, wanted in (("ppo_mini_batch_size", config.data.train_batch_size), ("ppo_epochs", 1)):
        if config.actor_rollout_ref.actor[key] != wanted:
            once = "keep ppo_mini_batch_size at data.train_batch_size and ppo_epochs at 1"
            why = "several updates a batch train on an older policy without any ratio"
            yield error(f"{_ACTOR}.{key}", why, f"{once}, or set allow_off_policy=true")
