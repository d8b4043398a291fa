"""Chooses the port for a service before anything starts. A port that you set is used or refused.
Others lie below the range for outgoing connections, because a server may bind only minutes later.
"""

import errno
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from drzero.ops.errors import UserError
from drzero.ops.process.lock import AlreadyRunning, HeldLock

_OURS = range(20_000, 32_768)  # below Linux's ports for outgoing connections (net.ipv4.ip_local_port_range)
EVERY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean every address of this machine, and one address to ask."""
_reserved: dict[int, HeldLock] = {}
"""This process's reservations, released by the kernel when the process ends."""


class PortTaken(UserError):
    """The port that the user set is in use."""


def free_port(preferred: int | None, host: str = "127.0.0.1") -> int:
    """Return `preferred` or a free TCP port, without holding it. Raises PortTaken."""
    if preferred is None:
        while True:
            with suppress(PortTaken):
                return free_port(random.choice(_OURS), host)
    with bind(preferred, host) as probe:
        return int(probe.getsockname()[1])


def bind(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Hold the port without listening, so that clients are refused until then. Raises PortTaken."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Like servers, ignore connections in TIME_WAIT from an earlier run.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"port {port} on {host} is taken by {_holder(port)}. "
            "Stop that process, set another port, or leave the port unset to get a free one."
        ) from None
    return held


def reserve_port(preferred: int | None, host: str = "127.0.0.1") -> int:
    """Like `free_port`, but no other run of this user gets the port while this process lives."""
    while True:
        port = free_port(preferred, host)
        if port in _reserved:  # our own service has not bound it yet
            if preferred is None:
                continue
            return port
        try:
            folder = Path(tempfile.gettempdir()) / f"drzero-ports-{os.getuid()}"
            _reserved[port] = HeldLock(folder / f"{port}.lock").__enter__()
            return port
        except AlreadyRunning as held:
            if preferred is not None:
                raise PortTaken(f"port {port} is reserved by another run on this machine: {held}") from None


def _holder(port: int | None) -> str:
    try:
        listeners = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        pid = next(c.pid for c in listeners if c.pid and c.laddr and c.laddr.port == port)
        return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())})"
    except (StopIteration, psutil.Error):
        return "a process of another user"


def address(host: str, port: int) -> str:
    """The address at which this machine asks a service that binds this host and port."""
    host = EVERY_HOST.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
