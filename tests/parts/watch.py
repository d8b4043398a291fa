"""The processes of a run while it ran: which existed, which listened, which are left."""

from contextlib import suppress
from dataclasses import dataclass, field

import psutil


@dataclass
class Watch:
    """Processes and listeners of one process tree, collected by looking at it now and then."""

    processes: dict[tuple[int, float], str] = field(default_factory=dict)
    """(pid, start time) → command line."""
    listeners: dict[tuple[str, int], str] = field(default_factory=dict)
    """(address, port) → command line of the process that listened."""
    recorders: set[tuple[str, str]] = field(default_factory=set)
    """SGLang's scheduler or training rank, and where its torch would open a recorder's pipe."""

    def poll(self, root: psutil.Process) -> None:
        """Add what is there now."""
        commands: dict[int, str] = {}
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                commands[process.pid] = " ".join(process.cmdline())
                self.processes.setdefault((process.pid, process.create_time()), commands[process.pid])
                for kind in ("sglang::scheduler", "ray::WorkerDict"):
                    if commands[process.pid].startswith(kind):
                        pipe = process.environ().get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
                        self.recorders.add((kind, pipe))
        # All of the machine at once: asked process by process this takes a third of a core.
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid in commands:
                address = connection.laddr.ip, connection.laddr.port
                # A worker of Ray's is called IDLE until it is an actor.
                if self.listeners.get(address, "ray::IDLE") == "ray::IDLE":
                    self.listeners[address] = commands[connection.pid]

    def alive(self) -> list[str]:
        """The command lines of those that still run."""
        left = []
        for (pid, started), command in self.processes.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{pid} {command}")
        return left
