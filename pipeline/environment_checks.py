"""What a run finds around it: ports, secrets, and whether its files can be judged from here at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ops.ports import PortTaken, free_port
from ops.stacks import why_unreadable
from pipeline.finding import Finding, error, note, warning

if TYPE_CHECKING:
    from pipeline.subject import Subject

_PLACEHOLDERS = ("your-", "your_", "<", "xxx", "changeme")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_ports(subject: Subject) -> Iterator[Finding]:
    """A port that was asked for must be free, and no other service's."""
    config = subject.config
    services = [
        name for name, used in (("retrieval", subject.searches), ("solver", subject.serves_model)) if used
    ]
    ports = {name: config[name].port for name in services if config[name].port is not None}
    for name, port in list(ports.items()):
        if not isinstance(port, int) or not 0 < port < 65536:
            yield error(f"{name}.port", port, f"{port} is no port", "choose one from 1024 to 65535, or none")
            del ports[name]
    if len(ports) == 2 and len(set(ports.values())) == 1:
        port = ports["solver"]
        yield error(
            "solver.port",
            port,
            f"retrieval.port and solver.port are both {port}",
            "choose two ports, or none",
        )
    for name in services:
        host = config[name].host
        if host not in _LOOPBACK:
            yield warning(
                f"{name}.host",
                host,
                f"the {name} service will listen at {host}, where other machines may reach it without a "
                "password",
                "use 127.0.0.1 unless that is what you want",
            )
        # What listens here says nothing of another machine.
        if name in ports and subject.machine.is_here:
            yield from _is_free(name, ports[name], host)


def _is_free(name: str, port: int, host: str) -> Iterator[Finding]:
    try:
        free_port(port, host)
    except PortTaken as taken:
        yield error(f"{name}.port", port, str(taken).rstrip("."), "")
    except OSError as reason:  # an address that is none of this machine's, a port for root alone
        yield error(
            f"{name}.host", host, f"nothing can listen at {host}:{port} ({reason.strerror})", "use 127.0.0.1"
        )


def check_secrets(subject: Subject) -> Iterator[Finding]:
    """Secrets that the run will want are there; their values are never shown."""
    if "wandb" in subject.config.trainer.logger and not os.environ.get("WANDB_API_KEY"):
        yield note(
            "WANDB_API_KEY",
            "not set",
            "Weights & Biases logs offline, into the run's folder",
            "put the key into .env to see runs live",
        )
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        value = os.environ.get(name, "")
        if value.lower().startswith(_PLACEHOLDERS):
            yield error(
                name,
                "set, but not to a key",
                f"{name} still is the placeholder of an example file",
                "put the key into .env, or leave the line out",
            )


def check_stacks(subject: Subject) -> Iterator[Finding]:
    """Where the run begins: py-spy must be allowed to read a process, or a stall has no stacks."""
    if subject.starting and (problem := why_unreadable()):
        yield warning(
            "watchdog",
            problem,
            "stacks of the run's processes cannot be read, so a stall would be told without its cause",
            "run as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0",
        )


def check_files_visible(subject: Subject) -> Iterator[Finding]:
    """Volumes of a machine elsewhere are not here: their files are judged there."""
    for root in ("corpus", "checkpoints"):
        if not subject.sees(root):
            place = subject.config.paths[root]
            yield warning(
                f"paths.{root}",
                place,
                f"{place} is not on this machine, so what lies there has not been judged",
                "let preflight run where the volume is mounted, before any GPU is asked for",
            )
