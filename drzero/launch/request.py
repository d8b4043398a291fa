"""A launch, resolved: what will run, on which machine, under which name, for how much at most.

    request = resolve(parse(words))
    print(request.as_yaml())        # printed at the start, and stored next to the run

Run file, environment default and flags are merged here, once, at the client; the result is sent to Modal.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drzero.launch.actions import ACTIONS, Action, find_action
from drzero.launch.arguments import Words
from drzero.launch.compute import CONFIG, Compute, for_gpus, load_compute
from drzero.launch.default_machine import billions_of, default_machine
from drzero.launch.environments import check_environment, is_task
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import ROOT, SOURCE
from drzero.launch.image.pins import flash_attn_wheel
from drzero.launch.known_keys import check_keys
from drzero.launch.runfile import (
    RunFile,
    check_option,
    model_group,
    model_of_loop,
    read_environment,
    read_runfile,
)
from drzero.ops.text import did_you_mean

WITH_TRAINER = "--with-trainer"
"""The switch of `drzero check-services`."""
CHECKS = ("check-services", "flow-test")
"""Actions that try parts of a run."""
CHECK_TIMEOUT_S = 3600
"""Default time limit of a check: no run, and started again by nobody."""
SMOKE_TIMEOUT_S = 1800
"""Default time limit of the GPU half: one that hangs costs a dollar or two, not a day."""
SMOKE_MAX_USD = 2
NO_RESUME = "trainer.resume_mode=disable"
"""The override with which a call does not resume from the one before."""
SMOKE = (
    *("run.name=smoke", NO_RESUME, "trainer.total_training_steps=3"),
    # veRL then logs a GPU's memory around each weight sync, which shows what sleeps and what is offloaded.
    "+process_env.VERL_LOGGING_LEVEL=DEBUG",
)
"""The smoke test's run: three steps of the challenger, always from the start."""
SMOKE_ON_GPUS = ("rollout=sglang", "data.train_batch_size=32", "run.min_free_gb=10")
SMOKE_MODEL = "base_model=Qwen/Qwen2.5-0.5B-Instruct"
"""The smallest of its family; the nine attention heads of the demo policy cannot be split in two."""
SMOKE_ON_SEVERAL_GPUS = (
    "solver.tp_size=2",
    # With a chat template of the hub's a prompt is longer than with the demo policy's.
    *("data.max_prompt_length=1024", "data.max_response_length=1024", "solver.max_context_tokens=2048"),
)
DEFAULT_MODEL = "qwen2.5-3b"
"""The model of the stages' own files (config/STAGE.yaml); its group sets nothing but the hub id."""
GENERAL = CONFIG / "runs" / "general.yaml"
"""The run file of a launch in an environment that names none."""
_NO_NAME = r"[^A-Za-z0-9_.-]+"
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Request:
    """Everything that a container needs to know about a launch; Modal pickles it."""

    id: str
    """Different for every launch; a retried or continued call has the same."""
    part: int
    """Calls of this launch before this one."""
    action: str
    name: str
    """The run's name, and that of the launch's folder on the volume."""
    preparations: tuple[tuple[str, ...], ...]
    """`drzero` commands that run on a CPU before preflight."""
    command: tuple[str, ...]
    """The `drzero` command."""
    compute: Compute
    reason: str
    """Why it is this machine."""
    preflight: bool
    env: str | None = None
    """The environment, as the stages call it; None for the user's own corpus."""
    script: str | None = None
    """What trains in place of `drzero train`, with the same overrides: a path in the checkout."""
    secrets: tuple[str, ...] = ()
    """Modal's named secrets for every call of the launch; found once, at its start."""

    def next_part(self) -> Request:
        """The same launch, in its next call."""
        return dataclasses.replace(self, part=self.part + 1)

    @property
    def usd_at_most(self) -> float | None:
        """US dollars that all its calls together cost at most; None without a limit."""
        by_time = self.compute.timeout / 3600 * self.compute.usd_per_hour
        limits = [self.compute.max_usd, by_time if NO_RESUME in self.command else None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def checked(self) -> tuple[str, ...]:
        """The stage and its overrides, as `drzero preflight` takes them."""
        if not find_action(self.action).of_stage:
            return self.command
        return tuple(word for word in self.command[1:] if word != WITH_TRAINER)

    @property
    def loads_a_model(self) -> bool:
        """Whether the machine would wait for the download of one."""
        return self.action != "flow-test"

    @property
    def shown(self) -> tuple[str, ...]:
        """The command as it is typed."""
        return ("python", self.script, *self.command[1:]) if self.script else ("drzero", *self.command)

    def as_yaml(self) -> str:
        """The resolved launch, for people."""
        values = {
            "launch": f"{self.action}: {self.name}",
            "command": " ".join(self.shown),
            "compute": dataclasses.asdict(self.compute),
            "because": self.reason,
            "usd_per_hour": round(self.compute.usd_per_hour, 2),
            "usd_at_most": None if self.usd_at_most is None else round(self.usd_at_most, 2),
        }
        if self.preparations:
            values["preparations"] = ["drzero " + " ".join(words) for words in self.preparations]
        return yaml.safe_dump(values, sort_keys=False, width=110)


def resolve(words: Words) -> Request:
    """Merge run file, environment default and flags; raises LaunchError for what is not possible."""
    file = read_runfile(words.config_path)
    env = _environment(words, file)
    action = _action(words, env)
    words = dataclasses.replace(words, action=action.name)
    if env is not None and is_task(env):
        file = _with_defaults(file, words, env)
    of_env = file.overrides_by_env.get(env or "", [])
    of_model = file.overrides_by_model.get(_model(words, file, env) or "", [])
    file = dataclasses.replace(file, overrides=[*file.overrides, *of_env, *of_model])
    choices = [f"env={env}"] if env else []
    # The last of a key wins, and the command line comes after the file.
    typed = tuple(word for word in (*file.overrides, *words.overrides) if not word.startswith("env="))
    check_keys(typed, file.image.get("pip", ()))
    compute, reason = _machine(action, file, words, env)
    changes, overrides = _of_machine(typed)
    compute = for_gpus(compute, words.gpu_type, words.gpu_count).changed(**changes)
    shared = [*choices, *_model_choice(words, file, env)]
    if action.is_job or action.name == "preflight":
        # Torch's own attention if the image has no flash-attn; the profile of one GPU uses it anyway.
        sdpa = compute.hardware == "8xh100" and flash_attn_wheel() is None
        attention = ["++actor_rollout_ref.model.override_config.attn_implementation=sdpa"] if sdpa else []
        shared = [*compute.overrides(), *attention, *shared]
    # A user's own corpus is uploaded; the demo world is made where it is used.
    is_demo = env == "demo" and action.is_job and action.name not in ("merge", "flow-test")
    is_demo_data = _is_demo_data(action, env)
    name = _named(typed, "run.name") or _default_name(action.name, words, file, env)
    if not _RUN_NAME.fullmatch(name):
        raise LaunchError(
            f"run.name={name}: it names a folder, and has letters, digits, '_', '-' and '.', 100 at most"
        )
    return Request(
        id=uuid.uuid4().hex,
        part=0,
        action=action.name,
        name=name,
        preparations=(("demo-data",),) if is_demo and not is_demo_data else (),
        command=_command(action, words, file, env, compute, shared, overrides),
        compute=compute,
        reason=reason,
        preflight=action.preflight and not is_demo_data,
        env=env,
        script=script_of(file, env) if action.name == "train" else None,
    )


def _environment(words: Words, file: RunFile) -> str | None:
    """The environment of a launch, as the stages call it; raises LaunchError for an unknown one."""
    if words.action == "smoke":
        return "demo"
    typed = _named(words.overrides, "env"), _named(file.overrides, "env")
    name = words.env or typed[0] or file.env or typed[1]
    return check_environment(name.strip("'\""), installs=file.image.get("pip", ())) if name else None


def _action(words: Words, env: str | None) -> Action:
    """What is launched; raises LaunchError for a stage that the environment does not have."""
    action = find_action(words.action or ("train" if is_task(env) else "challenger"))
    stage = _stage(action, words)
    if stage == "train" and not is_task(env):
        said = f"--env {env} is a corpus, which --action challenger searches" if env else "--env is missing"
        raise LaunchError(f"{stage}: {said}: name an environment, such as --env wordle")
    played = stage in ("train", "evaluate")
    if is_task(env) and not played and (action.is_job or action.name == "preflight"):
        raise LaunchError(
            f"--env {env}: {stage} searches a corpus (own or demo), and {env} is played: a model is trained "
            "in it by --action train, or ::train without --stage"
        )
    return action


def _with_defaults(file: RunFile, words: Words, env: str) -> RunFile:
    """A run file for an environment, on top of `config/runs/general.yaml` and what that has for it."""
    general = read_runfile(str(GENERAL))
    changes, settings = _of_machine(general.overrides_by_env.get(env, []))
    general = dataclasses.replace(
        general,
        compute={**general.compute, **changes},
        overrides=[*general.overrides, *settings],
        overrides_by_env={},
    )
    is_general = words.config_path is None or Path(words.config_path).resolve() == GENERAL
    compute = None if is_general else file.compute
    if compute is None and (words.gpu_count or 1) > 1:
        compute = {"count": words.gpu_count}
    if is_general:
        return dataclasses.replace(general, compute=_with_base(compute, general.compute))
    own_model = file.model is not None or bool(file.models_by_env)
    return dataclasses.replace(
        file,
        compute=_with_base(compute, general.compute),
        model=file.model if own_model else general.model,
        models_by_env=file.models_by_env if own_model else general.models_by_env,
        overrides=[*general.overrides, *file.overrides],
        overrides_by_model={**general.overrides_by_model, **file.overrides_by_model},
        scripts_by_env={**general.scripts_by_env, **file.scripts_by_env},
    )


def _with_base(compute: Any, general: dict[str, Any]) -> Any:
    """A run file's machine: without a base, the general one, or one for several GPUs."""
    if isinstance(compute, str) or "base" in (compute or {}):
        return compute
    changes = compute or {}
    if changes.get("count", 1) == 1:
        return {**general, **changes}
    of_general = {"type": load_compute(general["base"]).type, "timeout": general["timeout"]}
    return {"base": "8xh100", **of_general, **changes}


def script_of(file: RunFile, env: str | None) -> str | None:
    """The script that trains in an environment, as a container finds it; None for `drzero train`.

    Raises LaunchError for one that is not there, or that no container gets.
    """
    script = file.scripts_by_env.get(env or "")
    if script is None:
        return None
    path = Path(script)
    if path.suffix != ".py" or not (ROOT / path).is_file():
        raise LaunchError(f"scripts_by_env: {env}: {script}: no such Python file in the checkout")
    if path.parts[0] not in SOURCE:
        raise LaunchError(
            f"scripts_by_env: {env}: {script}: a container has no more of the checkout than "
            f"{', '.join(SOURCE)}: put it under examples/grpo/"
        )
    return script


def _machine(action: Action, file: RunFile, words: Words, env: str | None) -> tuple[Compute, str]:
    """The machine before `--gpu-type` and `--gpu-count`, and why it is this one."""
    if named := _named((*file.overrides, *words.overrides), "compute"):
        machine = RunFile().machine(named)
        if action.name == "smoke":
            machine = machine.changed(timeout=SMOKE_TIMEOUT_S, max_usd=SMOKE_MAX_USD)
        return machine, "it was asked for"
    if not (action.is_job or action.name == "preflight"):
        # A run file's machine is for runs; other actions keep their own.
        return RunFile().machine(action.compute or "cpu"), f"{action.name} runs on it"
    flags_choose = words.gpu_type is not None or words.gpu_count is not None
    base, reason = file.base, "it was asked for"
    if base is None:
        base, reason = _default_machine(action, file, words, env, flags_choose)
    machine = file.machine(base)
    if action.name in CHECKS:
        machine = machine.changed(timeout=min(machine.timeout, CHECK_TIMEOUT_S), retries=0)
    limit = read_environment(env).max_usd
    if action.name == "smoke":
        limit = SMOKE_MAX_USD
        if file.compute is None:
            machine = machine.changed(timeout=SMOKE_TIMEOUT_S)
    if limit is not None and machine.max_usd == RunFile().machine(base).max_usd:
        machine = machine.changed(max_usd=limit)
    return machine, "it was asked for" if flags_choose else reason


def _default_machine(
    action: Action, file: RunFile, words: Words, env: str | None, flags_choose: bool
) -> tuple[str, str]:
    """The file of the machine of a launch that names none, and the reason."""
    stage = _stage(action, words)
    if (fixed := find_action(stage).compute) is not None:
        return fixed, f"{stage} runs on it by default"
    typed = (*file.overrides, *words.overrides)
    chosen = _named(typed, "model", "base_model") or _model(words, file, env)
    served = _named(typed, "solver.model_path") if stage == "evaluate" else None
    if served and billions_of(served) is not None:
        chosen = served
    chosen = chosen or model_of_loop(_named(typed, "loop") or "") or DEFAULT_MODEL
    if flags_choose and billions_of(chosen) is None:
        return "single_h100", ""
    return default_machine(stage, chosen)


def _stage(action: Action, words: Words) -> str:
    """The action that runs, or that is checked; raises LaunchError for one that has no preflight."""
    if not action.of_stage:
        return action.name
    stage = words.stage or (words.places[0] if words.places else "challenger")
    known = [name for name, other in ACTIONS.items() if other.preflight and other.stage == name]
    if action.name == "check-services":
        known = ["challenger", "solver", *(["train"] if words.with_trainer else [])]
    if stage not in known:
        raise LaunchError(
            f"{action.name} {stage}: no such stage{did_you_mean(stage, known)}. Stages: {', '.join(known)}"
        )
    return stage


def _named(overrides: Sequence[str], *keys: str) -> str | None:
    """The last value that overrides give one of the keys."""
    values = [value for key, _, value in (word.partition("=") for word in overrides) if key in keys]
    return values[-1] if values else None


def _of_machine(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What overrides of `compute.KEY` change of the requested machine; the rest are for the stage."""
    rest, changes = [], {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key.startswith("compute."):
            try:
                changes[key.removeprefix("compute.")] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise LaunchError(f"{word}: {value!r} is no value of a machine") from None
        elif key != "compute":
            rest.append(word)
    return changes, rest


def _model(words: Words, file: RunFile, env: str | None) -> str | None:
    """file < environment default < flag."""
    return words.model or file.models_by_env.get(env or "") or read_environment(env).model or file.model


def _model_choice(words: Words, file: RunFile, env: str | None) -> list[str]:
    """The overrides for the model; none for the environment's, which its own file chooses."""
    name = _model(words, file, env)
    if not name or name == read_environment(env).model:
        return []
    if "/" not in name:
        return [f"model={check_option('model', name)}"]
    # A hub id, or a folder. Prompts and lengths of another group, such as the demo policy's, are not its own.
    if group := model_group(name):
        return [f"model={group}"]
    return [f"model={DEFAULT_MODEL}", f"base_model={name}"]


def _command(
    action: Action,
    words: Words,
    file: RunFile,
    env: str | None,
    compute: Compute,
    shared: list[str],
    overrides: list[str],
) -> tuple[str, ...]:
    if action.stage is None:
        return ()
    if action.name == "smoke":
        return _smoke(compute, shared, overrides)
    if _is_demo_data(action, env):
        if words.hop_ratio or overrides:
            raise LaunchError("--env demo brings its own prompts: prepare-data takes nothing else")
        return ("demo-data",)
    if action.name in ("status", "list-models"):
        return (action.name, *overrides)
    if action.name == "diagnose":
        return ("diagnose", run_name(words))
    stage = _stage(action, words)
    rest = [action.stage, *([stage] if action.of_stage else []), *shared]
    if words.with_trainer:
        rest.append(WITH_TRAINER)
    iteration = _iteration(stage, words, file, env)
    if iteration is not None and stage not in ("evolve", "train", "flow-test"):
        rest.append(f"iteration={iteration}")
    # A check has a folder of its own, never the run's.
    named = action.name if action.name in CHECKS else stage
    has_name = named in CHECKS or _is_of_model(stage, words, file, env) or is_task(env)
    if has_name and not _named(overrides, "run.name"):
        rest.append(f"run.name={_default_name(named, words, file, env)}")
    steps = words.steps or file.steps
    if steps and stage in ("challenger", "solver", "evolve"):
        rest.append(f"steps_per_iteration={steps}")
    if steps and stage == "train":
        rest.append(f"steps={steps}")
    rest += _hops(stage, words.hop_ratio or file.hop_ratio)
    if words.num_examples:
        if stage != "evaluate":
            raise LaunchError(f"--num-examples is for evaluate, not {stage}")
        key = "num_examples" if is_task(env) else "questions_per_benchmark"
        rest.append(f"{key}={words.num_examples}")
    return (*rest, *overrides)


def _smoke(compute: Compute, shared: list[str], overrides: list[str]) -> tuple[str, ...]:
    """A short challenger run; on GPUs by SGLang, on several of them with all that 8xh100 does."""
    of_user = [word for word in shared if word.startswith(("model=", "base_model="))]
    several = (*(() if of_user else (SMOKE_MODEL,)), *SMOKE_ON_SEVERAL_GPUS) if compute.count > 1 else ()
    return ("challenger", *shared, *(SMOKE_ON_GPUS if compute.count else ()), *several, *SMOKE, *overrides)


def _hops(stage: str, ratio: str | None) -> list[str]:
    if ratio is None:
        return []
    weights = ratio.replace(",", ":").split(":")
    if not all(weight.isdecimal() for weight in weights) or not any(int(weight) for weight in weights):
        raise LaunchError(f"--hop-ratio {ratio}: give the weights of 1, 2, 3, … hops, like 4:3:2:1")
    if stage in ("prepare-data", "challenger", "synthesize", "evolve"):
        return [f"hop_ratio=[{','.join(weights)}]"]
    raise LaunchError(f"--hop-ratio is for prompts and what is made from them, not {stage}")


def _is_demo_data(action: Action, env: str | None) -> bool:
    return action.name == "prepare-data" and env == "demo"


def _is_of_model(stage: str, words: Words, file: RunFile, env: str | None) -> bool:
    """Whether an evaluation is of the model that is named, and not of an iteration's solver.

    In an environment the model need not be named.
    """
    typed = _named((*file.overrides, *words.overrides), "iteration", "solver.model_path", "endpoint")
    chosen = words.iteration if words.iteration is not None else file.iteration
    is_named = words.model is not None or is_task(env)
    return stage == "evaluate" and is_named and chosen is None and typed is None


def _iteration(stage: str, words: Words, file: RunFile, env: str | None) -> int | None:
    if _is_of_model(stage, words, file, env):
        return 0  # the base model, before any training
    return words.iteration if words.iteration is not None else file.iteration


def _default_name(stage: str, words: Words, file: RunFile, env: str | None = None) -> str:
    if is_task(env):
        model = _model(words, file, env) if _is_of_model(stage, words, file, env) else None
        return "_".join(re.sub(_NO_NAME, "-", part.strip("/")) for part in (stage, env, model) if part)
    if _is_of_model(stage, words, file, env):
        return f"evaluate_{re.sub(r'[^A-Za-z0-9_.-]+', '_', (words.model or '').strip('/'))}"
    stage = stage.replace("-", "_")
    if stage in ("smoke", "evolve", "prepare_data", "check_services", "flow_test"):
        return stage
    typed = _named((*file.overrides, *words.overrides), "iteration")
    iteration = _iteration(stage, words, file, env)
    return f"{stage}_iter{typed or (1 if iteration is None else iteration)}"


def run_name(words: Words) -> str:
    """The run that logs, stacks and diagnose read: a name, or --stage with --iteration or --env."""
    if words.places:
        return words.places[0]
    return _default_name(words.stage or "challenger", words, RunFile(), _environment(words, RunFile()))
