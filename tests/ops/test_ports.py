"""Choosing ports."""

import os
import socket
import subprocess
import sys

import pytest

from drzero.ops.process.ports import PortTaken, free_port, reserve_port


def test_an_unset_port_can_be_bound_and_is_none_of_an_outgoing_connection_by_linuxs_default():
    ports = [free_port(None) for _ in range(100)]
    assert all(1024 < port < 32_768 for port in ports)
    with socket.create_server(("127.0.0.1", ports[-1])):
        pass


def test_a_taken_port_is_refused_with_its_holder_and_a_way_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            PortTaken, match=rf"port {port} on 127.0.0.1 is taken by pid {os.getpid()} \(.*pytest.*leave"
        ):
            free_port(port)


def test_a_port_left_in_time_wait_by_an_earlier_server_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # the side that closes first is left in TIME_WAIT
        client.close()
    assert free_port(port) == port


def test_an_address_of_another_machine_is_not_called_a_taken_port():
    with pytest.raises(OSError, match="assign requested address"):
        free_port(None, "203.0.113.1")


RESERVE = (
    "import sys; from drzero.ops.process.ports import reserve_port; "
    "print(reserve_port(int(sys.argv[1])), flush=True)"
)


def test_a_reserved_port_is_refused_to_other_runs_until_its_holder_ends():
    port = free_port(None)
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{RESERVE}; sys.stdin.read()", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == f"{port}\n"
    with pytest.raises(PortTaken, match=f"reserved by another run.*{holder.pid}"):
        reserve_port(port)
    holder.kill()
    holder.wait()
    assert reserve_port(port) == port


def test_a_port_reserved_here_is_given_again_only_where_it_is_asked_for(monkeypatch):
    # Else two services that start together would get one port, as neither has bound it yet.
    ours, other = reserve_port(None), free_port(None)
    found = iter([ours, ours, other])
    monkeypatch.setattr(
        "drzero.ops.process.ports.free_port", lambda preferred, host: preferred or next(found)
    )
    assert reserve_port(ours) == ours
    assert reserve_port(None) == other
