"""Writes down where a Python process, and those it starts, connect to: the file is $MODAL_PLANE_CONNECTIONS.

Python imports this module by its name at start, because the plane puts this folder on PYTHONPATH. An audit
hook sees every TCP connection, name lookup and datagram that goes through Python's sockets, before it
happens.

A container ends with the tests' process, however that ends.
"""

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def _watch(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.sendto" or (event == "socket.connect" and arguments[0].type == socket.SOCK_STREAM):
        # A datagram socket's connect sends nothing: it is how a process asks for its own address.
        if arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
            return
        host = arguments[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    # None is this machine: an address to listen at.
    if name:
        with open(os.environ["MODAL_PLANE_CONNECTIONS"], "a") as file:
            file.write(f"{name}\n")


if "MODAL_PLANE_CONNECTIONS" in os.environ:
    sys.addaudithook(_watch)
    if os.environ.get("MODAL_PLANE_PID") == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
