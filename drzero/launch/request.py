"""A launch, resolved: what will run, on which machine, under which name, and what it costs at most.

Command line, run file and environment defaults are merged on the client. Modal gets the `Request`.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from drzero.launch.actions import ACTIONS, Action, find_action
from drzero.launch.arguments import SERVE_GPUS, Words
from drzero.launch.compute import Compute, for_gpus, load_compute
from drzero.launch.default_machine import LABS, billions_of, default_machine
from drzero.launch.environments import check_environment, is_task
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import ROOT, SOURCE
from drzero.launch.image.pins import flash_attn_wheel
from drzero.launch.known_keys import STAGES, check_keys
from drzero.launch.runfile import (
    GENERAL,
    RunFile,
    environment_defaults,
    machine_changes,
    model_of_loop,
    model_option,
    read_runfile,
)
from drzero.launch.tunnel import served_overrides
from drzero.ops.text import counted, did_you_mean
from drzero.recipe.settings.schema import in_full

AGENT = "agent:"  # an environment that is an agent of the user's
WITH_TRAINER = "--with-trainer"
CHECKS = ("check-services", "flow-test", *LABS)
"""Actions that only try parts of a run: never resumed or retried."""
CHECK_TIMEOUT_S = 3600  # default time limit of a check, which is not retried
SMOKE_TIMEOUT_S = 1800  # default time limit of the smoke test, so that a hang costs a dollar or two
SMOKE_MAX_USD = 2
NO_RESUME = "trainer.resume_mode=disable"  # with this override a call does not resume from the one before
SMOKE = (
    "run.name=smoke",
    NO_RESUME,
    "trainer.total_training_steps=3",
    # veRL then logs the GPU's memory around each weight sync, which shows sleep and offload.
    "+process_env.VERL_LOGGING_LEVEL=DEBUG",
)
SMOKE_ON_GPUS = ("rollout=sglang", "data.train_batch_size=32", "run.min_free_gb=10")
SMOKE_MODEL = "base_model=Qwen/Qwen2.5-0.5B-Instruct"
"""The smallest of its family. The demo policy's nine attention heads cannot be split in two."""
SMOKE_ON_SEVERAL_GPUS = (
    "solver.tp_size=2",
    # The hub model's chat template makes longer prompts than the demo policy's.
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "solver.max_context_tokens=2048",
)
DEFAULT_MODEL = "qwen2.5-3b"  # of the stages (config/STAGE.yaml); the option sets only the hub id
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Request:
    """Everything a container needs to know about a launch. Modal pickles it."""

    id: str  # New for every launch. Retried and continued calls keep it.
    part: int
    action: str
    name: str
    preparations: tuple[tuple[str, ...], ...]  # `drzero` commands to run on a CPU before preflight
    command: tuple[str, ...]
    compute: Compute
    reason: str
    preflight: bool
    env: str | None = None
    script: str | None = None  # a script of the checkout that trains instead of `drzero train`
    secrets: tuple[str, ...] = ()  # Modal's named secrets, looked up once at the start of the launch

    def next_part(self) -> Request:
        """The same launch in its next call."""
        return dataclasses.replace(self, part=self.part + 1)

    @property
    def resumes(self) -> bool:
        """Whether another call continues it when its time is up."""
        return NO_RESUME not in self.command and self.action not in CHECKS

    @property
    def usd_at_most(self) -> float | None:
        """The most all its calls can cost in US dollars, or None without a limit."""
        by_time = self.compute.timeout / 3600 * self.compute.usd_per_hour
        limits = [self.compute.max_usd, None if self.resumes else by_time]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def checked(self) -> tuple[str, ...]:
        """The stage and its overrides, as `drzero preflight` takes them."""
        if not find_action(self.action).of_stage:
            return self.command
        return tuple(word for word in self.command[1:] if word != WITH_TRAINER)

    @property
    def loads_a_model(self) -> bool:
        """Whether the machine would have to download a model."""
        return self.action != "flow-test"

    @property
    def shown(self) -> tuple[str, ...]:
        """The command as a user would type it."""
        return ("python", self.script, *self.command[1:]) if self.script else ("drzero", *self.command)

    def as_yaml(self) -> str:
        """The launch, for people."""
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


@dataclass(frozen=True)
class _Launch:
    words: Words
    action: Action
    stage: str
    env: str | None
    file: RunFile  # for `env`, and on top of the general one where episodes are played
    machine_from: str  # the run file whose machine it starts from, if one names it

    @cached_property
    def typed(self) -> tuple[str, ...]:
        """All overrides but `env=`. The last of a key wins."""
        of_model = self.file.overrides_by_model.get(self.model or "", [])
        words = (*self.file.overrides, *of_model, *self.words.overrides)
        named = in_full(self.stage.replace("-", "_"), words)
        return tuple(word for word in named if not word.startswith("env="))

    def named(self, *keys: str) -> str | None:
        return _last(self.typed, *keys)

    @property
    def model(self) -> str | None:
        return self.words.model or self.file.model

    @property
    def plays(self) -> bool:
        return is_task(self.env)

    @property
    def uses_machine(self) -> bool:
        """Whether the run's own machine matters: for a run, or the preflight of one."""
        return self.action.is_job or self.action.name == "preflight"

    @property
    def makes_demo_data(self) -> bool:
        return self.action.name == "prepare-data" and self.env == "demo"

    @property
    def scores_model(self) -> bool:
        """Whether it evaluates the named or the environment's model, not an iteration's solver."""
        named = self.words.model is not None or self.plays
        elsewhere = self.named("iteration", "solver.model_path", "endpoint") is not None
        return self.stage == "evaluate" and named and self._iteration is None and not elsewhere

    @property
    def iteration(self) -> int | None:
        return 0 if self.scores_model else self._iteration

    @property
    def _iteration(self) -> int | None:
        return self.words.iteration if self.words.iteration is not None else self.file.iteration

    @property
    def default_name(self) -> str:
        """The run's name, unless `run.name` is given. A check has its own folder, never the run's."""
        stage = self.action.name if self.action.name in CHECKS else self.stage
        if self.plays:
            parts = [stage, self.env, self.model if self.scores_model else None]
            return "_".join(re.sub(r"[^A-Za-z0-9_.-]+", "-", part.strip("/")) for part in parts if part)
        if self.scores_model:
            return f"evaluate_{re.sub(r'[^A-Za-z0-9_.-]+', '_', (self.words.model or '').strip('/'))}"
        if stage not in STAGES:
            return stage.replace("-", "_")
        return f"{stage}_iter{self.named('iteration') or (1 if self.iteration is None else self.iteration)}"


def resolve(words: Words) -> Request:
    """Merge command line, run file and environment defaults. Raises LaunchError for anything impossible."""
    launch = _merged(words)
    action = launch.action
    check_keys(launch.typed, launch.file.image.get("pip", ()))
    machine, reason = _machine(launch)
    changes, overrides = machine_changes(launch.typed)
    compute = for_gpus(machine, words.gpu_type, words.gpu_count).changed(**changes)
    _check_split(launch, compute)
    name = launch.named("run.name") or launch.default_name
    if not _RUN_NAME.fullmatch(name):
        raise LaunchError(
            f"run.name={name}: it names a folder, and has letters, digits, '_', '-' and '.', 100 at most"
        )
    # Users upload their own corpus; the demo world is made where it is used.
    makes_world = launch.env == "demo" and action.is_job and action.name not in ("merge", "flow-test")
    return Request(
        id=uuid.uuid4().hex,
        part=0,
        action=action.name,
        name=name,
        preparations=(("demo-data",),) if makes_world and not launch.makes_demo_data else (),
        command=_command(launch, compute, overrides),
        compute=compute,
        reason=reason,
        preflight=action.preflight and not launch.makes_demo_data,
        env=launch.env,
        script=_script(launch) if action.name == "train" else None,
    )


def _check_split(launch: _Launch, compute: Compute) -> None:
    split = launch.named(SERVE_GPUS)
    if split is None or split == "null" or not launch.uses_machine:
        return
    serving = int(split) if split.isdecimal() else split.count(",") + 1
    if serving >= compute.count:
        most = compute.count - 1
        fix = f"let {most} serve at most" if most > 0 else f"rent more by --gpu-count {2 * serving}"
        why = f"compute={compute.name} has {counted(compute.count, 'GPU')}, and none would be left to train"
        raise LaunchError(f"{SERVE_GPUS}={split}: {why}: {fix}")


def run_name(words: Words) -> str:
    """The run that logs, stacks and diagnose read: a name, or --stage with --iteration or --env."""
    if words.places:
        return words.places[0]
    env, stage = _environment(words, RunFile()), words.stage or "challenger"
    return _Launch(words, find_action(words.action), stage, env, RunFile(), "").default_name


# Merging ----------------------------------------------------------------------------------------------------


def _merged(words: Words) -> _Launch:
    file = read_runfile(words.config_path)
    env = _environment(words, file)
    action = find_action(words.action or ("train" if is_task(env) else "challenger"))
    stage = _stage(action, words)
    if stage == "train" and not is_task(env):
        said = f"--env {env} is a corpus, which --action challenger searches" if env else "--env is missing"
        raise LaunchError(f"{stage}: {said}: name an environment, such as --env wordle")
    machine_from = words.config_path
    if env is not None and is_task(env):
        if stage not in ("train", "evaluate") and (action.is_job or action.name == "preflight"):
            raise LaunchError(
                f"--env {env}: {stage} searches a corpus (own or demo), and {env} is played: a model is "
                "trained in it by --action train, or ::train without --stage"
            )
        if file.base is None:
            machine_from = f"config/runs/{GENERAL.name}"
        is_general = words.config_path is None or Path(words.config_path).resolve() == GENERAL
        file = file.on_general(env, is_general=is_general)
    else:
        file = file.in_environment(env)
    return _Launch(words, action, stage, env, file, machine_from or "")


def _environment(words: Words, file: RunFile) -> str | None:
    if words.action == "smoke":
        return "demo"
    if words.action != "agent-bench" and (agent := _last(words.overrides, "agent")):
        return f"{AGENT}{agent}"
    name = words.env or _last(words.overrides, "env") or file.env or _last(file.overrides, "env")
    return check_environment(name.strip("'\""), installs=file.image.get("pip", ())) if name else None


def _stage(action: Action, words: Words) -> str:
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


def _last(overrides: Sequence[str], *keys: str) -> str | None:
    values = [value for key, _, value in (word.partition("=") for word in overrides) if key in keys]
    return values[-1] if values else None


def _script(launch: _Launch) -> str | None:
    """Raises LaunchError for a script that no container would have."""
    env, script = launch.env, launch.file.scripts_by_env.get(launch.env or "")
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


# The machine ------------------------------------------------------------------------------------------------


def _machine(launch: _Launch) -> tuple[Compute, str]:
    action, file = launch.action, launch.file
    is_smoke = action.name == "smoke"
    if named := launch.named("compute"):
        smoke = {"timeout": SMOKE_TIMEOUT_S, "max_usd": SMOKE_MAX_USD} if is_smoke else {}
        return load_compute(named).changed(**smoke), f"compute={named} names it"
    if not launch.uses_machine:
        # A run file's machine is for runs.
        return load_compute(action.compute or "cpu"), f"{action.name} runs on it"
    base, reason = file.base, f"{launch.machine_from} names it"
    if base is None:
        base, reason = _default_machine(launch)
    if launch.words.gpu_type is not None or launch.words.gpu_count is not None:
        reason = "--gpu-type and --gpu-count choose it"
    machine = file.machine(base)
    if action.name in CHECKS:
        machine = machine.changed(timeout=min(machine.timeout, CHECK_TIMEOUT_S), retries=0)
    if is_smoke and file.compute is None:
        machine = machine.changed(timeout=SMOKE_TIMEOUT_S)
    limit = SMOKE_MAX_USD if is_smoke else environment_defaults(launch.env).max_usd
    if limit is not None and machine.max_usd == load_compute(base).max_usd:
        machine = machine.changed(max_usd=limit)
    return machine, reason


def _default_machine(launch: _Launch) -> tuple[str, str]:
    stage = launch.stage
    if stage == "agent-bench" and launch.named("endpoint"):
        return "cpu", "its model is served elsewhere"
    if (fixed := find_action(stage).compute) is not None:
        return fixed, f"{stage} runs on it by default"
    served = launch.named("solver.model_path") if stage == "evaluate" else None
    if served is None or billions_of(served) is None:
        served = launch.named("model", "base_model") or launch.model
    of_loop = model_of_loop(launch.named("loop") or "")
    if launch.words.gpu_type is not None and launch.words.gpu_count is None:
        return "single_h100", ""  # one of that type
    rehearses = of_loop is not None or environment_defaults(launch.env).model is not None
    return default_machine(stage, served or of_loop or DEFAULT_MODEL, rehearses=rehearses)


# The command ------------------------------------------------------------------------------------------------


def _command(launch: _Launch, compute: Compute, overrides: list[str]) -> tuple[str, ...]:
    action, words, stage = launch.action, launch.words, launch.stage
    if action.stage is None:
        return ()
    shared = _shared(launch, compute)
    if action.name == "smoke":
        return _smoke(compute, shared, overrides)
    if launch.makes_demo_data:
        if words.hop_ratio or overrides:
            raise LaunchError("--env demo brings its own prompts: prepare-data takes nothing else")
        return ("demo-data",)
    if action.name in ("status", "list-models"):
        return (action.name, *overrides)
    if action.name == "diagnose":
        return ("diagnose", run_name(words))
    rest = [action.stage, *([stage] if action.of_stage else []), *shared]
    if words.with_trainer:
        rest.append(WITH_TRAINER)
    if launch.iteration is not None and stage not in ("evolve", "train", "flow-test"):
        rest.append(f"iteration={launch.iteration}")
    if action.name == "flow-test":
        flags = {"stage": words.stage, "seconds": words.seconds, "provoke": words.provoke}
        rest += [f"flow_test.{key}={value}" for key, value in flags.items() if value is not None]
        rest += ["flow.workers=true"] if words.workers else []
    has_own_name = action.name in CHECKS or stage in CHECKS or launch.scores_model or launch.plays
    if has_own_name and not _last(overrides, "run.name"):
        rest.append(f"run.name={launch.default_name}")
    steps = words.steps or launch.file.steps
    if steps and stage in ("challenger", "solver", "evolve"):
        rest.append(f"steps_per_iteration={steps}")
    if steps and stage == "train":
        rest.append(f"steps={steps}")
    if stage in LABS and compute.type and launch.named("rollout") is None:
        rest.append("rollout=sglang")
    rest += _hops(stage, words.hop_ratio or launch.file.hop_ratio)
    if words.num_examples:
        if stage != "evaluate":
            raise LaunchError(f"--num-examples is for evaluate, not {stage}")
        key = "num_examples" if launch.plays else "questions_per_benchmark"
        rest.append(f"{key}={words.num_examples}")
    if stage == "agent-bench":
        rest += _benched(launch)
        overrides = [word for word in overrides if not word.startswith("agent=")]
    return (*rest, *(served_overrides(overrides) if stage == "serve-model" else overrides))


def _benched(launch: _Launch) -> list[str]:
    names = [*launch.words.places, *(name for name in (launch.named("agent"),) if name)]
    if len(names) != 1 or not {".", ":"} & set(names[0]):
        raise LaunchError(
            f"agent-bench {' '.join(names)}: name one agent of yours, as FILE.py:NAME or module:NAME. An "
            "environment is played by --action evaluate --env NAME"
        )
    return [f"agent={names[0]}", *([] if launch.named("endpoint") else ["serve=true"])]


def _shared(launch: _Launch, compute: Compute) -> list[str]:
    words = []
    if launch.uses_machine:
        words += compute.overrides()
        # Without a flash-attn wheel attention is torch's own, which the profile of one GPU uses anyway.
        if compute.hardware == "8xh100" and flash_attn_wheel() is None:
            words.append("++actor_rollout_ref.model.override_config.attn_implementation=drzero_packed")
    if launch.env and not launch.env.startswith(AGENT):  # agent= is among the overrides
        words.append(f"env={launch.env}")
    model = launch.model
    # A machine without a GPU has the demo policy by default, and makes what another action's GPUs will read.
    of_loop = model_of_loop(launch.named("loop") or "")
    if (model or launch.named("model") or of_loop) is None and compute.hardware == "cpu":
        model = DEFAULT_MODEL
    # The environment's own file chooses its default model.
    if model and model != environment_defaults(launch.env).model:
        option = model_option(model)
        # A model without an option must not get the demo policy's prompts and lengths.
        words += [f"model={option}"] if option else [f"model={DEFAULT_MODEL}", f"base_model={model}"]
    return words


def _smoke(compute: Compute, shared: list[str], overrides: list[str]) -> tuple[str, ...]:
    """A short challenger run: with SGLang on GPUs, and with all of 8xh100's mechanisms on several."""
    words = ["challenger", *shared]
    if compute.count:
        words += SMOKE_ON_GPUS
    if compute.count > 1:
        names_model = any(word.startswith(("model=", "base_model=")) for word in shared)
        words += [*([] if names_model else [SMOKE_MODEL]), *SMOKE_ON_SEVERAL_GPUS]
    return (*words, *SMOKE, *overrides)


def _hops(stage: str, ratio: str | None) -> list[str]:
    if ratio is None:
        return []
    weights = ratio.replace(",", ":").split(":")
    if not all(weight.isdecimal() for weight in weights) or not any(int(weight) for weight in weights):
        raise LaunchError(f"--hop-ratio {ratio}: give the weights of 1, 2, 3, … hops, like 4:3:2:1")
    if stage in ("prepare-data", "challenger", "synthesize", "evolve"):
        return [f"hop_ratio=[{','.join(weights)}]"]
    raise LaunchError(f"--hop-ratio is for prompts and what is made from them, not {stage}")
