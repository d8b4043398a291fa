"""A launch, resolved: what will run, on which machine, under which name, for how much at most.

    request = resolve(parse(words))
    print(request.as_yaml())        # printed at the start, and stored next to the run

Run file, environment default and flags are merged here, once, at the client; the result is sent to Modal.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass

import yaml

from launch.actions import Action, find_action
from launch.arguments import Words
from launch.compute import Compute, for_gpus
from launch.errors import LaunchError
from launch.image.pins import flash_attn_wheel
from launch.runfile import RunFile, check_option, chooses_model, read_runfile

SMOKE_STEPS = 3
SMOKE_TIMEOUT_S = 1800
"""Default time limit of the GPU half: one that hangs costs a dollar, not a day."""


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
    preflight: bool
    secrets: tuple[str, ...] = ()
    """Modal's named secrets for every call of the launch; found once, at its start."""

    def next_part(self) -> Request:
        """The same launch, in its next call."""
        return dataclasses.replace(self, part=self.part + 1)

    def as_yaml(self) -> str:
        """The resolved launch, for people."""
        values = {
            "launch": f"{self.action}: {self.name}",
            "command": "drzero " + " ".join(self.command),
            "compute": dataclasses.asdict(self.compute),
            "usd_per_hour": round(self.compute.usd_per_hour, 2),
        }
        if self.preparations:
            values["preparations"] = ["drzero " + " ".join(words) for words in self.preparations]
        return yaml.safe_dump(values, sort_keys=False, width=110)


def resolve(words: Words) -> Request:
    """Merge run file, environment default and flags; raises LaunchError for what is not possible."""
    action, file = find_action(words.action), read_runfile(words.config_path)
    env = words.env or file.env
    compute = for_gpus(_machine(action, file, words), words.gpu_type, words.gpu_count)
    compute, overrides = _budget(compute, [*file.overrides, *words.overrides])
    choices = [f"env={check_option('env', env)}"] if env else []
    shared = [*choices, *_model_choice(words, file, env)]
    if action.is_job or action.name == "preflight":
        # Torch's own attention if the image has no flash-attn; the profile of one GPU uses it anyway.
        sdpa = compute.hardware == "8xh100" and flash_attn_wheel() is None
        attention = ["++actor_rollout_ref.model.override_config.attn_implementation=sdpa"] if sdpa else []
        shared = [*compute.overrides(), *attention, *shared]
    # A user's own corpus is uploaded; the demo world is made where it is used.
    is_demo = action.name == "smoke" or (env == "demo" and action.is_job and action.name != "merge")
    is_demo_data = _is_demo_data(action, env)
    named = [word.partition("=")[2] for word in overrides if word.startswith("run.name=")]
    return Request(
        id=uuid.uuid4().hex,
        part=0,
        action=action.name,
        name=named[-1] if named else _default_name(action.name, _iteration(words, file)),
        preparations=(("demo-data",),) if is_demo and not is_demo_data else (),
        command=_command(action, words, file, shared, overrides),
        compute=compute,
        preflight=action.preflight and not is_demo_data,
    )


def _machine(action: Action, file: RunFile, words: Words) -> Compute:
    # The last one wins, and the command line comes after the file.
    overrides = (*file.overrides, *words.overrides)
    named = [word.partition("=")[2] for word in overrides if word.startswith("compute=")]
    if named:
        return RunFile(compute=named[-1]).machine(action.compute)
    # A run file's machine is for runs; other actions keep their own.
    checked = action.is_job or action.name == "preflight"
    default = "8xh100" if action.name == "preflight" else action.compute
    machine = file.machine(default) if checked else RunFile().machine(action.compute)
    if action.name == "smoke" and file.compute is None:
        return machine.changed(timeout=SMOKE_TIMEOUT_S)
    return machine


def _budget(compute: Compute, overrides: list[str]) -> tuple[Compute, list[str]]:
    """Overrides of `compute.KEY` change the requested machine; the rest are for the stage."""
    rest, changes = [], {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key.startswith("compute."):
            changes[key.removeprefix("compute.")] = yaml.safe_load(value)
        elif key != "compute":
            rest.append(word)
    return (compute.changed(**changes) if changes else compute), rest


def _model_choice(words: Words, file: RunFile, env: str | None) -> list[str]:
    """file < environment default < flag."""
    of_file = None if env and chooses_model(env) else file.model
    name = words.model or file.models_by_env.get(env or "") or of_file
    if not name:
        return []
    # An option of config/model/, or a hub id, which has a slash.
    return [f"base_model={name}" if "/" in name else f"model={check_option('model', name)}"]


def _command(
    action: Action, words: Words, file: RunFile, shared: list[str], overrides: list[str]
) -> tuple[str, ...]:
    if action.stage is None:
        return ()
    if action.name == "smoke":
        return _smoke(shared, overrides)
    if _is_demo_data(action, words.env or file.env):
        if words.hop_ratio or overrides:
            raise LaunchError("--env demo brings its own prompts: prepare-data takes nothing else")
        return ("demo-data",)
    if action.name in ("status", "list-models"):
        return (action.name, *overrides)
    if action.name == "diagnose":
        return ("diagnose", run_name(words))
    if action.name == "preflight":
        stage = words.stage or (words.places[0] if words.places else "challenger")
        rest = ["preflight", stage, *shared]
    else:
        stage = action.name
        rest = [action.stage, *shared]
    iteration = _iteration(words, file)
    if iteration is not None and stage != "evolve":
        rest.append(f"iteration={iteration}")
    steps = words.steps or file.steps
    if steps and stage in ("challenger", "solver", "evolve"):
        rest.append(f"steps_per_iteration={steps}")
    rest += _hops(stage, words.hop_ratio or file.hop_ratio)
    if words.num_examples:
        if stage != "evaluate":
            raise LaunchError(f"--num-examples is for evaluate, not {stage}")
        rest.append(f"questions_per_benchmark={words.num_examples}")
    return (*rest, *overrides)


def _smoke(shared: list[str], overrides: list[str]) -> tuple[str, ...]:
    """Three real steps of the packaged small model, through SGLang if there is a GPU."""
    engine = [
        *("actor_rollout_ref.rollout.name=sglang", "solver.engine=sglang"),
        *("solver.tp_size=1", "solver.dp_size=1"),
    ]
    on_gpu = any(word.startswith("compute=") and word != "compute=cpu" for word in shared)
    fresh = ["run.name=smoke", "trainer.resume_mode=disable", f"trainer.total_training_steps={SMOKE_STEPS}"]
    return ("demo", *shared, *(engine if on_gpu else []), *fresh, *overrides)


def _hops(stage: str, ratio: str | None) -> list[str]:
    if ratio is None:
        return []
    weights = ratio.replace(",", ":").split(":")
    if not all(weight.isdecimal() for weight in weights) or not any(int(weight) for weight in weights):
        raise LaunchError(f"--hop-ratio {ratio}: give the weights of 1, 2, 3, … hops, like 4:3:2:1")
    if stage == "prepare-data":
        return [f"hop_ratio=[{','.join(weights)}]"]
    if stage == "challenger":
        return [f"data.train_files=${{paths.corpus}}/data/zero_ratio{''.join(weights)}.parquet"]
    raise LaunchError(f"--hop-ratio is for prepare-data and challenger, not {stage}")


def _is_demo_data(action: Action, env: str | None) -> bool:
    return action.name == "prepare-data" and env == "demo"


def _iteration(words: Words, file: RunFile) -> int | None:
    return words.iteration if words.iteration is not None else file.iteration


def _default_name(stage: str, iteration: int | None) -> str:
    stage = stage.replace("-", "_")
    if stage in ("smoke", "evolve", "prepare_data"):
        return stage
    return f"{stage}_iter{1 if iteration is None else iteration}"


def run_name(words: Words) -> str:
    """The run that logs and diagnose read: a name, or --stage with --iteration."""
    return words.places[0] if words.places else _default_name(words.stage or "challenger", words.iteration)
