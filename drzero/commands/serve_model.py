"""`drzero serve-model`: a model behind OpenAI's requests until you interrupt it, to try an agent on.

    drzero serve-model model=smollm2-135m port=8080
    drzero serve-model model=Qwen/Qwen2.5-3B-Instruct rollout=sglang background=true
    drzero serve-model model=outputs/checkpoints/solver_iter1_hf hardware=cpu

It is a run's server with its settings and checks: our reference engine, or SGLang (rollout=sglang).
`/v1/completions`, `/v1/chat/completions` (tools, streams), `/v1/models` and `/health` answer OpenAI's own
client. With OPENAI_API_KEY set, here or in .env, requests need it as their bearer token. A server in the
background prints its process id, its log and the command that ends it. At DRZERO_STOP_AT it ends by itself.
"""

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
from omegaconf import DictConfig, OmegaConf, open_dict

from drzero.ops.bearer import MODEL_KEY, PUBLIC_ADDRESS, bearer_of
from drzero.ops.console import say
from drzero.ops.errors import OutOfTime, RunFailed, UserError
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.ports import address, reserve_port
from drzero.ops.services.services import ServiceGroup
from drzero.ops.stop_time import seconds_left
from drzero.preflight.run import require
from drzero.recipe.compose import resolve, write_resolved
from drzero.stages.models import model_name
from drzero.stages.services import add_call_form, solver_spec

_LOG_LINES = 15


def run_serve_model(config: DictConfig) -> None:
    """Serve until interrupted, or in the background. Raises PreflightFailed, ServiceDied or RunFailed."""
    require(config, "serve_model")
    with open_dict(config):
        config.solver.port = reserve_port(config.port, config.host)
        config.served_name = config.served_name or model_name(config.base_model)
        add_call_form(config, config.call_form)
    config = resolve(config)
    if config.background:
        _start(config)
    else:
        serve(config)


def serve(config: DictConfig) -> None:
    """Serve in the foreground. Raises ServiceDied if the server ends."""
    folder = Path(config.run.dir)
    spec = replace(solver_spec(config, "model", config.served_name), relays=True)
    with HeldLock(folder / "lock"), ServiceGroup([spec]) as services:
        _describe(config)
        say("serve-model", "Ctrl-C ends it")
        try:
            while seconds_left() > 0:
                services.check()
                time.sleep(0.5)
            services.events.add("exit", "serve-model", "its time was up", code=0)
        except (KeyboardInterrupt, SystemExit):  # the intended end
            services.events.add("exit", "serve-model", "ended as asked", code=0)
            raise


def _describe(config: DictConfig) -> None:
    at = os.environ.get(PUBLIC_ADDRESS) or address(config.solver.host, config.solver.port)
    url = f"{at}/v1"
    token = f"the bearer token in {MODEL_KEY}" if bearer_of(MODEL_KEY) else "no token, or any"
    say("serve-model", f"{url} answers for the model {config.served_name!r}, with {token}. For an agent:")
    # Alone on its line, to be copied.
    print(f"\nexport OPENAI_BASE_URL={url}\n", flush=True)


def _start(config: DictConfig) -> None:
    log = Path(config.run.dir) / "logs" / "serve_model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "drzero.commands.serve_model", str(write_resolved(config))]
    with log.open("a", encoding="utf-8") as output:
        output.write(f"{shlex.join(command)}\n")
        output.flush()
        from_here = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _await_health(config, process, log, from_here)
    except BaseException:  # also Ctrl-C: an unreported server must not stay
        process.terminate()
        process.wait()
        raise
    _describe(config)
    say("serve-model", f"it runs as pid {process.pid}, its log is {log}; `kill {process.pid}` ends it")


def _await_health(config: DictConfig, process: "subprocess.Popen[bytes]", log: Path, from_here: int) -> None:
    url = f"{address(config.solver.host, config.solver.port)}/health"
    deadline = time.monotonic() + config.solver.startup_budget_s
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            said = (
                log.read_bytes()[from_here:].decode(errors="replace").rstrip("\n").split("\n")[-_LOG_LINES:]
            )
            lines = "\n".join(f"  {line}" for line in said)
            raise RunFailed(f"the server ended with exit code {code}; last lines:\n{lines}\nlog: {log}")
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    budget = f"solver.startup_budget_s={config.solver.startup_budget_s:g}"
    raise RunFailed(f"the server does not answer within {budget}; log: {log}")


def main(arguments: list[str] | None = None) -> int:
    """Serve by a resolved config that another process has checked. Returns the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    try:
        serve(DictConfig(OmegaConf.load(path)))
    except (UserError, RunFailed, OutOfTime) as error:
        print(f"serve-model: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
