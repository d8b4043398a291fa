"""The recipes on Modal: image, volumes, secrets, functions, and one command line. No recipe logic.

    pip install modal pyyaml python-dotenv && modal setup
    modal run modal_train.py --action smoke
    modal run modal_train.py --action prepare-data --env demo
    modal run --detach modal_train.py --action challenger --iteration 1 --model qwen2.5-3b +trainer.foo=1
    modal run modal_train.py::train --env demo --steps 10 --gpu-type A10G --gpu-count 1

The command line is parsed and merged with run file and environment (launch.request), a CPU container prepares
the data and runs `drzero preflight`, and only then the machine is requested. The call on that machine is the
whole supervised run (launch.container): it commits the volume as it goes and starts the next call when its
time is up. The terminal only reports. docs/modal.md has the details.

At the client this file needs nothing but modal, pyyaml, python-dotenv and the standard library.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import modal
from dotenv import dotenv_values

from launch.actions import find_action
from launch.arguments import (
    Words,
    of_function,
    parse,
    parse_function,
    split_overrides,
    words_of_modal_run,
)
from launch.client import launch_running, run_download, run_logs, run_upload
from launch.compute import MODAL_LIMIT_S
from launch.errors import LaunchError
from launch.image.image import SOURCE, ImageExtras, cpu_image, gpu_image
from launch.request import Request, resolve
from launch.runfile import read_runfile
from launch.secrets import NAMED, dotenv_secret, named_secrets
from launch.volumes import MOUNTS, volume_names

ROOT = Path(__file__).resolve().parent
DOTENV = dotenv_values(ROOT / ".env")
ROOTS = ("paths.corpus={corpus}", "paths.checkpoints={checkpoints}")
"""Overrides of every `drzero` command there; a container fills in the folders of its volumes."""
ASK_TIMEOUT_S = 1800
"""Time limit of the short CPU calls."""


def _plan() -> tuple[Words | None, ImageExtras, dict[str, str]]:
    """Parse the command line before Modal builds anything; exits with 2 on a mistake.

    Returns the words of our own entry point (None for another), the user's additions to the images, and the
    volumes' names.
    """
    try:
        words = words_of_modal_run(sys.argv, Path(__file__).name)
        planned = parse(words) if words is not None else None
        called = planned or parse_function(sys.argv, Path(__file__).name)
        if called is not None:
            resolve(called)
        path = called.config_path if called else None
        if planned is None and path and Path(path).parts[0] not in SOURCE:
            raise LaunchError(
                f"--config-path {path}: an app function reads it in a container, which has no more of the "
                "checkout than config/ and the code: put it under config/, or use --action"
            )
        image = read_runfile(path).image
        extras = ImageExtras(**{part: tuple(items) for part, items in image.items()})
        # Defined here already, so that a mistake in the additions is one line.
        cpu_image(extras)
        return planned, extras, volume_names(ENVIRONMENT)
    except LaunchError as error:
        print(f"modal_train: {error}", file=sys.stderr)
        sys.exit(2)


ENVIRONMENT = {**{key: value or "" for key, value in DOTENV.items()}, **os.environ}
PLANNED, EXTRAS, NAMES = _plan()
VOLUMES = {kind: modal.Volume.from_name(name, create_if_missing=True) for kind, name in NAMES.items()}
SECRET = dotenv_secret(ROOT)

app = modal.App("dr-zero")
# A container imports this file too, and must define the same volumes and the same number of secrets.
_shared: dict[str, Any] = {
    "volumes": {MOUNTS[kind]: volume for kind, volume in VOLUMES.items()},
    "secrets": [SECRET],
    "env": {key: ENVIRONMENT.get(key, "") for key in ("EXPERIMENTER", "EXPERIMENT_NAME")},
}


# In the containers ------------------------------------------------------------------------------------------


@app.function(image=cpu_image(EXTRAS), cpu=2, memory=8192, timeout=ASK_TIMEOUT_S, **_shared)
def ask(module: str, words: list[str]) -> int:
    """Run one of our command lines on a CPU, commit what it wrote, and return its exit code."""
    return _module(module, words)


@app.function(image=cpu_image(EXTRAS), timeout=MODAL_LIMIT_S, **_shared)
def cpu_stage(request: Request) -> dict[str, Any]:
    """A launch, or a part of one, on a machine without a GPU."""
    return _run(request)


# Only if it is needed: --action list-models and preflight must not wait for the GPU image.
if PLANNED is None or (find_action(PLANNED.action).is_job and resolve(PLANNED).compute.type is not None):

    @app.function(image=gpu_image(EXTRAS), timeout=MODAL_LIMIT_S, **_shared)
    def gpu_stage(request: Request) -> dict[str, Any]:
        """A launch, or a part of one, on GPUs; the call sets which (`with_options`)."""
        return _run(request)

    @app.function(image=gpu_image(EXTRAS), cpu=4, memory=16384, timeout=ASK_TIMEOUT_S, **_shared)
    def check_gpu_image() -> int:
        """The CPU half of the smoke test, in the image for GPUs."""
        return _module("launch.image.container_check", ["gpu"])


def _module(module: str, words: list[str]) -> int:
    from launch.container import run_module

    _reload()
    try:
        return run_module(module, words)
    finally:
        _commit()


def _run(request: Request) -> dict[str, Any]:
    """One call: the stage under supervision, and the next call if its time is up."""
    from launch.container import run_job

    _reload()
    outcome = run_job(request, commit=_commit, app_id=app.app_id)
    result = {"state": outcome.state, "message": outcome.message, "usd": outcome.usd, "next": None}
    if outcome.state == "continue":
        result["next"] = _on_machine(request).spawn(request.next_part()).object_id
    return result


def _reload() -> None:
    for volume in VOLUMES.values():
        volume.reload()


def _commit() -> None:
    for volume in VOLUMES.values():
        volume.commit()


# At the client, or in the container of an app function ------------------------------------------------------


def _on_machine(request: Request) -> modal.Function[Any, Any, Any]:
    """The stage's function with the machine and the secrets of this launch."""
    function = gpu_stage if request.compute.type else cpu_stage
    return _with(function, request.secrets, **request.compute.modal_options())


def _with(
    function: modal.Function[Any, Any, Any], secrets: tuple[str, ...], **options: Any
) -> modal.Function[Any, Any, Any]:
    """The function with named secrets next to `.env`, and with other options."""
    if not secrets and not options:
        return function
    # These options replace those the function was defined with.
    named = [modal.Secret.from_name(name) for name in secrets]
    return function.with_options(secrets=[SECRET, *named], env=_shared["env"], **options)


def _secrets() -> tuple[str, ...]:
    """The named secrets that a launch gets; prints a line for each that is missing.

    Only for the start of a launch: inside its calls the secrets it already has would be taken for `.env`.
    """
    # In the container of an app function the contents of `.env` are in the environment.
    own = {} if modal.is_local() else {key: os.environ.get(key) for key in NAMED.values()}
    names, notes = named_secrets({**DOTENV, **own})
    for note in notes:
        print(f"[launch] {note}")
    return names


def conduct(request: Request) -> None:
    """Prepare, preflight, run and follow a launch to its end; raises LaunchError if it does not finish."""
    print(request.as_yaml(), end="")
    if (reason := launch_running(VOLUMES["checkpoints"], request.name)) is not None:
        raise LaunchError(f"{request.name}: {reason}")
    request = dataclasses.replace(request, secrets=_secrets())
    on_cpu = _with(ask, request.secrets)
    if request.action == "smoke" and _check_container(request):
        raise LaunchError("the CPU half of the smoke test failed (see above); no GPU was requested")
    for stage, *words in request.preparations:
        if on_cpu.remote("pipeline.cli", [stage, *ROOTS, *words]):
            raise LaunchError(f"drzero {stage} failed (see above); no machine was requested")
    if request.preflight:
        stage, *words = request.command
        if on_cpu.remote("pipeline.cli", ["preflight", stage, *ROOTS, *words]):
            raise LaunchError("preflight found errors (see above); no machine was requested")
        # GPUs cost the same while they wait for a download.
        if request.compute.type and on_cpu.remote("pipeline.cli", ["fetch-models", stage, *ROOTS, *words]):
            raise LaunchError("a model could not be fetched (see above); no machine was requested")
    # Spawned: with --detach it then survives this terminal, while Modal would cancel a blocking call.
    call = _on_machine(request).spawn(request)
    print(
        f"[launch] {request.name} is requested (call {call.object_id}); with --detach this terminal may be "
        "closed now",
        flush=True,
    )
    result = call.get()
    while result["next"]:
        print(f"[launch] {result['message']}: {result['next']}")
        result = modal.FunctionCall.from_id(result["next"]).get()
    print(f"[launch] {result['message']}; it cost ${result['usd']:.2f}")
    if result["state"] != "finished":
        raise LaunchError(result["message"])


def _check_container(request: Request) -> int:
    """Exit code of the CPU half of the smoke test, in the image of the GPU half."""
    if request.compute.type:
        return int(_with(check_gpu_image, request.secrets).remote())
    return int(_with(ask, request.secrets).remote("launch.image.container_check", ["cpu"]))


@app.local_entrypoint()
def main(*words: str) -> None:
    """`modal run modal_train.py --action X …`."""
    try:
        _act(parse(words))
    except LaunchError as error:
        print(f"modal_train: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        # Modal ends its client with 0 then; with --detach, where nothing ends, that is right.
        if {"--detach", "-d"} & set(sys.argv):
            raise
        print("modal_train: interrupted: the app ends with it; the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
    # Modal's own: a time-out, a lost connection, a missing permission.
    except modal.exception.Error as error:
        print(f"modal_train: Modal: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _act(words: Words) -> None:
    by_client = {"upload": run_upload, "download": run_download, "logs": run_logs}
    if words.action in by_client:
        by_client[words.action](words, VOLUMES["corpus" if words.action == "upload" else "checkpoints"])
        return
    request = resolve(words)
    if find_action(words.action).is_job:
        conduct(request)
        return
    verb, *rest = request.command
    if verb == "status":
        code = ask.remote("launch.status", [])
    elif verb == "diagnose":
        code = ask.remote("pipeline.cli", ["diagnose", f"{{checkpoints}}/{rest[0]}"])
    elif verb == "preflight":
        code = _with(ask, _secrets()).remote("pipeline.cli", ["preflight", rest[0], *ROOTS, *rest[1:]])
    else:
        code = ask.remote("pipeline.cli", [verb, *ROOTS, *rest])
    if code:
        raise SystemExit(code)


# App functions: `modal run modal_train.py::train --flag value` ----------------------------------------------


@app.function(image=cpu_image(EXTRAS), cpu=0.25, memory=512, timeout=MODAL_LIMIT_S, **_shared)
def train(
    stage: str = "challenger",
    env: str = "",
    steps: int = 0,
    model: str = "",
    iteration: int = -1,
    hop_ratio: str = "",
    gpu_type: str = "",
    gpu_count: int = -1,
    config_path: str = "",
    overrides: str = "",
) -> None:
    """Train: the challenger unless `--stage solver` or `--stage evolve`; overrides in one string."""
    _launch(
        stage,
        overrides,
        env=env,
        steps=steps,
        model=model,
        iteration=iteration,
        hop_ratio=hop_ratio,
        gpu_type=gpu_type,
        gpu_count=gpu_count,
        config_path=config_path,
    )


@app.function(image=cpu_image(EXTRAS), cpu=0.25, memory=512, timeout=MODAL_LIMIT_S, **_shared)
def evaluate(
    env: str = "",
    model: str = "",
    iteration: int = -1,
    num_examples: int = 0,
    gpu_type: str = "",
    gpu_count: int = -1,
    config_path: str = "",
    overrides: str = "",
) -> None:
    """Evaluate a model on the benchmarks; `--num-examples` questions of each."""
    _launch(
        "evaluate",
        overrides,
        env=env,
        model=model,
        iteration=iteration,
        num_examples=num_examples,
        gpu_type=gpu_type,
        gpu_count=gpu_count,
        config_path=config_path,
    )


@app.function(image=cpu_image(EXTRAS), cpu=0.25, memory=512, timeout=MODAL_LIMIT_S, **_shared)
def train_with_config(config_path: str, stage: str = "challenger", env: str = "", steps: int = 0) -> None:
    """Train with the settings of a run file."""
    _launch(stage, config_path=config_path, env=env, steps=steps)


def _launch(action: str, overrides: str = "", **flags: Any) -> None:
    """Launch with the flags that were given: not with empty text, -1, or 0 steps or examples."""
    unset = {"steps": 0, "num_examples": 0}
    given = {key: value for key, value in flags.items() if value not in ("", unset.get(key, -1))}
    try:
        conduct(resolve(of_function(action, overrides=split_overrides(overrides), **given)))
    except LaunchError as error:
        # The client raises what is raised here: so it ends with this line, and not with a traceback.
        raise SystemExit(f"modal_train: {error}") from None
