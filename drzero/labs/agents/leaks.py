"""Find connections and tasks that runs leave open. Thousands use up the process's file descriptors.

before = connections()
await settled(before)                          # {("127.0.0.1", 8080): [Connection(…), …]}
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import psutil

_SETTLES_S = 2.0  # connections may close in the background for this long
_EVERY_S = 0.1


@dataclass(frozen=True)
class Connection:
    """A TCP connection this process opened."""

    port: int  # the local one
    host: str
    to_port: int


def connections() -> set[Connection]:
    """The connections this process opened, without those its servers accepted."""
    found = psutil.Process().net_connections("tcp")
    listening = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
    return {
        Connection(one.laddr.port, one.raddr.ip, one.raddr.port)
        for one in found
        if one.raddr and one.laddr.port not in listening
    }


async def settled(before: Set[Connection]) -> Mapping[tuple[str, int], Sequence[Connection]]:
    """New connections that stay open, by their target."""
    left = connections() - before
    for _ in range(round(_SETTLES_S / _EVERY_S)):
        if not left:
            break
        await asyncio.sleep(_EVERY_S)
        left &= connections()
    by_place: defaultdict[tuple[str, int], list[Connection]] = defaultdict(list)
    for one in sorted(left, key=lambda one: one.port):
        by_place[one.host, one.to_port].append(one)
    return by_place


def tasks_left(before: Set[asyncio.Task[object]]) -> list[str]:
    """The name and line of each new task that still runs."""
    names = []
    for task in asyncio.all_tasks() - before - {asyncio.current_task()}:
        frames = task.get_stack(limit=1)
        place = f" ({frames[0].f_code.co_filename}:{frames[0].f_lineno})" if frames else ""
        names.append(f"{getattr(task.get_coro(), '__qualname__', task.get_name())}{place}")
    return sorted(names)
