"""The processes of a run: which existed, which listened, which are left."""

from contextlib import suppress
from dataclasses import dataclass, field

import psutil


@dataclass
class Watch:
    """Processes and listeners of one process tree, collected by polling."""

    processes: dict[tuple[int, float], str] = field(default_factory=dict)
    """(pid, start time) → command line."""
    listeners: dict[tuple[str, int], str] = field(default_factory=dict)
    """(address, port) → the listening process's last command line: Ray and SGLang rename theirs late."""
    recorders: set[tuple[str, str]] = field(default_factory=set)
    """SGLang's schedulers and training ranks, each with the path of its recorder's pipe."""

    def poll(self, root: psutil.Process) -> None:
        commands: dict[int, str] = {}
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if not command.strip():  # it ends, or is just being renamed: other polls see its name
                    continue
                commands[process.pid] = command
                self.processes.setdefault((process.pid, process.create_time()), command)
                for kind in ("sglang::scheduler", "ray::WorkerDict"):
                    if command.startswith(kind):
                        pipe = process.environ().get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
                        self.recorders.add((kind, pipe))
        # All of the machine at once, because asking each process takes a third of a core.
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid in commands:
                self.listeners[connection.laddr.ip, connection.laddr.port] = commands[connection.pid]

    def alive(self) -> list[str]:
        left = []
        for (pid, started), command in self.processes.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{pid} {command}")
        return left
