"""A real SGLang server of the pinned version on a CPU, started as `hardware=cpu rollout=sglang` does."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager

import httpx
import pytest

from drzero.ops.process.ports import reserve_port
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.services import solver_spec

STARTS_WITHIN_S = 600


@contextmanager
def serving(python, model, log, context, sequences):
    """The address of a float32 server for this many conversations of `context` tokens at once."""
    overrides = ["hardware=cpu", "rollout=sglang", f"solver.model_path={model}", "solver.dtype=float32"]
    overrides += [f"solver.max_batch_size={sequences}", f"solver.max_context_tokens={context}"]
    overrides += [f"solver.port={reserve_port(None)}"]
    config = resolve(compose_stage("challenger", overrides))
    spec = solver_spec(config)
    assert spec.command[1:3] == ("-m", "sglang.launch_server")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, *spec.command[1:]],
            env={**os.environ, **spec.env, "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(process, spec.health_url, log)
        yield spec.health_url.removesuffix("/health")
    finally:
        # On SIGTERM, SGLang waits for requests whose clients are gone.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(process, url, log):
    give_up = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if httpx.get(url, timeout=30, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail(f"SGLang did not come up:\n{log.read_text(errors='replace')[-3000:]}")
