"""What parts of a run have to say to one another: policy, engines, index, run folder, conversation.

Each check takes a `Subject` and yields findings; `pipeline.preflight` gathers them all. They read the
composed config, the index's metadata and the disk, and load no model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from omegaconf import DictConfig
from transformers import AutoTokenizer

from pipeline.finding import CheckError, Finding, error, note, refusal, warning
from pipeline.memory_ledger import trained
from search.embedders import model_identity
from search.store import open_collection
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids, turn_end_id
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA
from verl_ext.method.tool_calls import render_tool_call

if TYPE_CHECKING:
    from pipeline.subject import Subject

__all__ = ["CheckError", "load_chat_tokenizer", "load_tokenizer"]

_MODE = "trainer.v1.trainer_mode"


def check_on_policy(subject: Subject) -> Iterator[Finding]:
    """HRPO is on-policy: whatever trains on an older policy must be asked for twice."""
    config = subject.config
    if config.method != "hrpo" or config.allow_off_policy:
        return
    mode, actor = config.trainer.v1.trainer_mode, config.actor_rollout_ref.actor
    if mode != "drzero_hrpo_sync":
        yield error(
            _MODE,
            mode,
            f"trainer mode {mode} trains on questions of an older policy, and HRPO is on-policy",
            "use mode=sync, or say allow_off_policy=true",
        )
    for key, is_one in (
        ("ppo_mini_batch_size", actor.ppo_mini_batch_size == config.data.train_batch_size),
        ("ppo_epochs", actor.ppo_epochs == 1),
    ):
        if not is_one:
            yield error(
                f"actor_rollout_ref.actor.{key}",
                actor[key],
                "several updates a batch train on an older policy without any ratio",
                "keep ppo_mini_batch_size at data.train_batch_size and ppo_epochs at 1, or say "
                "allow_off_policy=true",
            )


def check_engines(subject: Subject) -> Iterator[Finding]:
    """The chosen engines must exist and have what the rest of the config asks of them."""
    config = subject.config
    if subject.serves_model and config.solver.engine not in ("sglang", "reference"):
        yield error(
            "solver.engine",
            config.solver.engine,
            f"there is no engine {config.solver.engine!r} for the solver's server",
            "choose sglang or reference",
        )
    if subject.serves_model and config.solver.engine == "sglang" and config.trainer.device == "cpu":
        yield error(
            "solver.engine",
            "sglang",
            "SGLang needs a GPU, and trainer.device is cpu",
            "use solver.engine=reference",
        )
    if subject.trains:
        yield from _rollout_engine(config)


def _rollout_engine(config: DictConfig) -> Iterator[Finding]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name not in ("sglang", "reference", "vllm"):
        yield error(
            "actor_rollout_ref.rollout.name",
            rollout.name,
            f"there is no rollout engine {rollout.name!r}",
            "choose sglang, or reference on a CPU or one GPU",
        )
    if rollout.name != "reference":
        return
    if not config.trainer.v1.trainer_mode.endswith("_sync"):
        yield error(
            _MODE,
            config.trainer.v1.trainer_mode,
            "the reference engine has no partial rollouts",
            "use mode=sync or another engine",
        )
    if model.lora_rank > 0 and not model.lora.merge:
        yield error(
            "actor_rollout_ref.model.lora.merge",
            model.lora.merge,
            "the reference engine takes whole weights, not adapters",
            "set actor_rollout_ref.model.lora.merge=true",
        )


def check_index(subject: Subject) -> Iterator[Finding]:
    """The collection must be there and built with the embedder that will serve it."""
    config, built = subject.config, subject.readings.embedders
    place = (str(config.chroma.path), str(config.chroma.collection))
    if place not in built:
        with open_collection(config.chroma.path, config.chroma.collection) as store:
            built[place] = store.info.embedder
    embedder = config.retrieval.embedder
    if model_identity(built[place]) != model_identity(embedder):
        yield error(
            "retrieval.embedder",
            embedder,
            f"collection {place[1]!r} in {place[0]} was built with {built[place]}, but retrieval.embedder is "
            f"{embedder}",
            f"set retrieval.embedder={built[place]}, or index the corpus again",
        )


def load_tokenizer(path: str, key: str) -> Any:
    """The tokenizer of the model that `key` names; PreflightFailed for neither a folder nor a hub id."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as reason:
        raise refusal(
            key,
            path,
            f"there is no model at {path}, neither a folder nor on a hub within reach "
            f"({str(reason).splitlines()[0]})",
            "correct it, or download the model first. The demo's models come with `drzero demo-data`",
        ) from reason


def load_chat_tokenizer(path: str, key: str) -> Any:
    """The tokenizer of a model that can hold our conversations; PreflightFailed for another. `key` names it.

    That takes ChatML and a chat template which renders tools and tool responses, and grows turn by turn.
    """
    tokenizer = load_tokenizer(path, key)
    try:
        flaw = _conversation_flaw(tokenizer)
    except (ValueError, TypeError, TemplateError) as reason:  # of templates: raise_exception, None + text
        flaw = str(reason)
    if flaw:
        raise refusal(
            key,
            path,
            f"the model at {path} cannot hold a conversation with searches: {flaw}",
            "choose a ChatML model whose chat template renders tools, such as Qwen2.5-Instruct",
        )
    return tokenizer


def _conversation_flaw(tokenizer: Any) -> str | None:
    turn_end_id(tokenizer)
    messages = [{"role": role, "content": "text"} for role in ("system", "user")]
    with_tools, without = (render_prompt_ids(tokenizer, messages, t) for t in ([SEARCH_TOOL_SCHEMA], None))
    if with_tools == without:
        return "its chat template does not render tools"
    if tool_turn_ids(tokenizer, [], ["one"]) == tool_turn_ids(tokenizer, [], ["two"]):
        return "its chat template does not render tool responses"
    return None


def token_drift(tokenizer: Any) -> int:
    """Tokens of a conversation with two searches, built turn by turn, that its own text does not give again.

    0 for a tokenizer whose turns can be put together and taken apart. Training never re-tokenises; a server
    or a tool that is given the text would then see another conversation than was trained on.
    """
    ids = render_prompt_ids(tokenizer, [{"role": "user", "content": "Who came?"}], [SEARCH_TOOL_SCHEMA])
    for query in ("town", "river Ø 3"):
        call = f"<think>So.</think>{render_tool_call([query])}<|im_end|>"
        turn = tokenizer.encode(call, add_special_tokens=False)
        ids = [*ids, *turn, *tool_turn_ids(tokenizer, turn, [f"[1] {query}\nText."])]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    again = tokenizer.encode(text, add_special_tokens=False)
    return sum(a != b for a, b in zip(ids, again, strict=False)) + abs(len(ids) - len(again))


def check_run_folder(subject: Subject) -> Iterator[Finding]:
    """The run's folder must be one that can be made and written to, with `run.min_free_gb` GB free.

    Nothing is left behind: where the folder is not there yet, the nearest one above it is tried.
    """
    config = subject.config
    folder = Path(config.run.dir)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        free_gb = _free_gb(place)
    except OSError as reason:
        yield error(
            "run.dir",
            folder,
            f"{folder} cannot be written ({reason.strerror} at {place})",
            "choose another place (paths.checkpoints=…), or make this one writable",
        )
        return
    if free_gb < config.run.min_free_gb:
        # The disk of another machine may be larger.
        told = error if subject.machine.is_here else warning
        yield told(
            "run.min_free_gb",
            config.run.min_free_gb,
            f"the disk of {folder} has {free_gb:.1f} GB free, and run.min_free_gb="
            f"{config.run.min_free_gb:g} are wanted",
            "make room, choose another place (paths.checkpoints=…), or lower run.min_free_gb if less will do",
        )
    elif subject.trains:
        yield from _room_for_checkpoints(subject, free_gb)


def _free_gb(place: Path) -> float:
    """GB free at a folder, once a file has been written there; OSError where none can be."""
    probe = place / f".drzero-{os.getpid()}.tmp"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        return shutil.disk_usage(place).free / 1e9
    finally:
        with suppress(OSError):
            probe.unlink()


def _room_for_checkpoints(subject: Subject, free_gb: float) -> Iterator[Finding]:
    """4 bytes a weight and 8 more of a trained one; one checkpoint more than is kept, and the export."""
    config = subject.config
    shape = subject.shape(config.actor_rollout_ref.model.path)
    kept = config.trainer.max_actor_ckpt_to_keep
    if shape is None or not subject.machine.is_here:
        return
    checkpoint_gb = (4 * shape.parameters + 8 * trained(config, shape)) / 1e9
    if kept is None:
        yield note(
            "trainer.max_actor_ckpt_to_keep",
            kept,
            f"every checkpoint is kept, {checkpoint_gb:.0f} GB each",
            "set how many are to be kept, unless there is room for all",
        )
        return
    wanted = (kept + 1) * checkpoint_gb + 2 * shape.parameters / 1e9
    if free_gb < wanted:
        yield warning(
            "run.dir",
            config.run.dir,
            f"the disk has {free_gb:.0f} GB free; {kept + 1} checkpoints and an export take {wanted:.0f} GB",
            "make room, or keep fewer (trainer.max_actor_ckpt_to_keep)",
        )
