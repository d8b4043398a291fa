"""The recipes on Modal: images, volumes, secrets, functions, and one command line. No recipe logic.

    modal run modal_train.py --action smoke
    modal run --detach modal_train.py --action challenger --iteration 1 --model qwen2.5-3b +trainer.foo=1
    modal run modal_train.py::train --env vf-wordle --steps 200

A CPU container runs preflight before the machine is requested. See docs/modal.md.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import modal

from drzero.launch.actions import find_action
from drzero.launch.arguments import Words, parse_modal_run
from drzero.launch.claims import Claims
from drzero.launch.client import run_download, run_logs, run_upload
from drzero.launch.compute import MODAL_LIMIT_S
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import ImageExtras, cpu_image, gpu_image, with_packages_of
from drzero.launch.image.own_files import carried
from drzero.launch.request import Request, resolve
from drzero.launch.runfile import read_runfile
from drzero.launch.secrets import check_token, client_environment, dotenv_secret, named_secrets
from drzero.launch.stacks import answering, run_stacks
from drzero.launch.tunnel import public_address
from drzero.launch.volumes import MOUNTS, NAMING, name_beside, volume_names

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = client_environment(ROOT)
ROOTS = ("paths.corpus={corpus}", "paths.checkpoints={checkpoints}")
"""Overrides of every `drzero` command. A container fills in its folders."""
ASK_TIMEOUT_S = 1800  # time limit of short CPU calls


def _plan() -> tuple[Words | None, Request | None, ImageExtras, dict[str, str]]:
    """Parse the command line before Modal builds anything, and exit with 2 on a mistake."""
    try:
        words = parse_modal_run(sys.argv, Path(__file__).name)
        request = resolve(words) if words is not None else None
        if words is not None:
            check_token(words.action, words.open, ROOT)
        extras = ImageExtras.of(read_runfile(words.config_path if words else None).image)
        if request is not None:
            has_agent = any(word.startswith("agent=") for word in request.command)
            extras = with_packages_of("agent" if has_agent else request.env, extras)
            command, files = carried(request.command)
            request = dataclasses.replace(request, command=tuple(command))
            extras = dataclasses.replace(extras, scripts=(*extras.scripts, *files))
        cpu_image(extras)  # so that a mistake in the additions is one line
        return words, request, extras, volume_names(ENVIRONMENT)
    except LaunchError as error:
        print(f"modal_train: {error}", file=sys.stderr)
        sys.exit(2)


WORDS, REQUEST, EXTRAS, NAMES = _plan()
VOLUMES = {kind: modal.Volume.from_name(name, create_if_missing=True) for kind, name in NAMES.items()}
TABLE = modal.Dict.from_name(name_beside(NAMES, "claims"), create_if_missing=True)
CLAIMS = Claims(TABLE)
SECRET = dotenv_secret(ROOT)

app = modal.App("dr-zero")
# A container imports this file too, and must define the same volumes and as many secrets.
_shared: dict[str, Any] = {
    "volumes": {MOUNTS[kind]: volume for kind, volume in VOLUMES.items()},
    "secrets": [SECRET],
    "env": {key: ENVIRONMENT.get(key, "") for key in NAMING},
}


# In the containers ------------------------------------------------------------------------------------------


@app.function(image=cpu_image(EXTRAS), cpu=2, memory=8192, timeout=ASK_TIMEOUT_S, **_shared)
def ask(module: str, words: list[str]) -> int:
    """Run one of our command lines on a CPU, commit what it wrote, and return its exit code."""
    return _module(module, words)


@app.function(image=cpu_image(EXTRAS), timeout=MODAL_LIMIT_S, **_shared)
def cpu_stage(request: Request) -> dict[str, Any]:
    """One call of a launch without a GPU."""
    return _run(request)


# Actions without a GPU, such as list-models, must not wait for the GPU image.
if REQUEST is None or (find_action(REQUEST.action).is_job and REQUEST.compute.type is not None):

    @app.function(image=gpu_image(EXTRAS), timeout=MODAL_LIMIT_S, **_shared)
    def gpu_stage(request: Request) -> dict[str, Any]:
        """One call of a launch on GPUs, which the call sets (`with_options`)."""
        return _run(request)

    @app.function(image=gpu_image(EXTRAS), cpu=4, memory=16384, timeout=ASK_TIMEOUT_S, **_shared)
    def check_gpu_image() -> int:
        """The CPU half of the smoke test, in the image for GPUs."""
        return _module("drzero.launch.image.container_check", ["gpu"])


def _module(module: str, words: list[str]) -> int:
    from drzero.launch.container import run_module

    _reload()
    try:
        return run_module(module, words)
    finally:
        errors = []
        for volume in VOLUMES.values():
            try:
                volume.commit()
            # Modal may raise anything; the other volumes are committed first.
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("a volume could not be committed", errors)


def _run(request: Request) -> dict[str, Any]:
    """Run the stage under supervision, and request the next call if time is up."""
    from drzero.launch.container import run_job

    mine = modal.current_function_call_id() or ""
    if (other := CLAIMS.take(request, mine, app.app_id)) != mine:
        return {"state": "elsewhere", "message": f"{request.name} is run by", "usd": 0.0, "next": other}
    _reload()
    with answering(TABLE, mine), public_address(request.command):
        outcome = run_job(request, VOLUMES, app_id=app.app_id)
    result = {"state": outcome.state, "message": outcome.message, "usd": outcome.usd, "next": None}
    if outcome.state == "continue":
        result["next"] = _request_call(request.next_part())
    return result


def _reload() -> None:
    # A reused container has the volumes as its last call left them.
    for volume in VOLUMES.values():
        volume.reload()


# At the client ----------------------------------------------------------------------------------------------


def _with(
    function: modal.Function[Any, Any, Any], secrets: tuple[str, ...], **options: Any
) -> modal.Function[Any, Any, Any]:
    if not secrets and not options:
        return function
    # `secrets` and `env` replace the values in the function's definition.
    named = [modal.Secret.from_name(name) for name in secrets]
    return function.with_options(secrets=[SECRET, *named], env=_shared["env"], **options)


def _request_call(request: Request) -> str:
    """The call of this part of a launch, requested once even if the caller is restarted."""
    if (known := CLAIMS.call_of(request)) is not None:
        return known
    function = _with(
        gpu_stage if request.compute.type else cpu_stage, request.secrets, **request.compute.modal_options()
    )
    # With --detach a spawned call survives this terminal; Modal would cancel a blocking one.
    call = function.spawn(request)
    try:
        holder = CLAIMS.take(request, call.object_id, app.app_id)
    except LaunchError:
        call.cancel()
        raise
    if holder != call.object_id:
        call.cancel()
    return holder


def conduct(request: Request) -> None:
    """Prepare, preflight, run and follow a launch. Raises LaunchError if it does not finish."""
    print(request.as_yaml(), end="")
    CLAIMS.require_free(request)
    request = dataclasses.replace(request, secrets=named_secrets(ROOT))
    _check(request)
    call = _request_call(request)
    print(
        f"[launch] {request.name} is requested (call {call}); with --detach this terminal may be closed now",
        flush=True,
    )
    result = modal.FunctionCall.from_id(call).get()
    while result["next"]:
        print(f"[launch] {result['message']}: {result['next']}")
        result = modal.FunctionCall.from_id(result["next"]).get()
    print(f"[launch] {result['message']}; it cost ${result['usd']:.2f}")
    if result["state"] != "finished":
        raise LaunchError(result["message"])


def _check(request: Request) -> None:
    on_cpu = _with(ask, request.secrets)
    if request.action == "smoke" and _check_container(request):
        raise LaunchError("the CPU half of the smoke test failed (see above); no GPU was requested")
    for stage, *words in request.preparations:
        if on_cpu.remote("drzero.cli", [stage, *ROOTS, *words]):
            raise LaunchError(f"drzero {stage} failed (see above); no machine was requested")
    if request.preflight:
        stage, *words = request.checked
        if on_cpu.remote("drzero.cli", ["preflight", stage, *ROOTS, *words]):
            raise LaunchError("preflight found errors (see above); no machine was requested")
        # Download on a CPU: a waiting GPU costs as much as a busy one.
        fetches = request.compute.type and request.loads_a_model
        if fetches and on_cpu.remote("drzero.cli", ["fetch-models", stage, *ROOTS, *words]):
            raise LaunchError("a model could not be fetched (see above); no machine was requested")


def _check_container(request: Request) -> int:
    if request.compute.type:
        return int(_with(check_gpu_image, request.secrets).remote())
    return int(_with(ask, request.secrets).remote("drzero.launch.image.container_check", ["cpu"]))


def _launch() -> None:
    assert WORDS is not None and REQUEST is not None
    try:
        _act(WORDS, REQUEST)
    except LaunchError as error:
        print(f"modal_train: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        # Modal ends its client with 0, which is right with --detach, where nothing ends.
        if {"--detach", "-d"} & set(sys.argv):
            raise
        print("modal_train: interrupted: the app ends with it; the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
    except modal.exception.Error as error:
        print(f"modal_train: Modal: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _act(words: Words, request: Request) -> None:
    by_client = {"upload": run_upload, "download": run_download, "logs": run_logs}
    if request.action in by_client:
        by_client[request.action](words, VOLUMES["corpus" if request.action == "upload" else "checkpoints"])
        return
    if request.action == "stacks":
        if code := run_stacks(words, TABLE, CLAIMS):
            raise SystemExit(code)
        return
    if find_action(request.action).is_job:
        conduct(request)
        return
    verb, *rest = request.command
    if verb == "status":
        code = ask.remote("drzero.launch.status", [])
    elif verb == "diagnose":
        code = ask.remote("drzero.cli", ["diagnose", f"{{checkpoints}}/{rest[0]}"])
    elif verb == "preflight":
        code = _with(ask, named_secrets(ROOT)).remote("drzero.cli", ["preflight", rest[0], *ROOTS, *rest[1:]])
    else:
        code = ask.remote("drzero.cli", [verb, *ROOTS, *rest])
    if code:
        raise SystemExit(code)


# `modal run modal_train.py` runs the only entry point there is.
if WORDS is None or WORDS.function == "main":

    @app.local_entrypoint()
    def main(*words: str) -> None:
        """`modal run modal_train.py --action X …`."""
        _launch()

else:

    @app.local_entrypoint()
    def train(*words: str) -> None:
        """Train in an environment (`--env vf-wordle`), otherwise the challenger, or `--stage`."""
        _launch()

    @app.local_entrypoint()
    def evaluate(*words: str) -> None:
        """Evaluate a model on the benchmarks, or in an environment."""
        _launch()

    @app.local_entrypoint()
    def train_with_config(*words: str) -> None:
        """Train with the settings of a run file."""
        _launch()
