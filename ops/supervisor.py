"""Run the main command of a run while its services live, and say whose fault it is when something ends."""

import time

from ops.logs import say
from ops.process import Child, ChildError, Command, describe_exit
from ops.services import ServiceGroup

_POLL_S = 0.25
_BLAME_S = 1.0  # a service whose end made the command fail may take a moment to be seen as ended


class ChildFailed(ChildError):
    """The main command ended with an error of its own."""


def run_supervised(main: Command, services: ServiceGroup, grace_s: float = 15.0) -> int:
    """Run `main` to its end inside an entered `services` group and return its exit code, 0.

    Whatever ends this function (success, failure, Ctrl-C, SIGTERM), the command's whole process tree is gone
    after it, `grace_s` seconds after SIGTERM at the latest. The services are left to their group.

    Raises:
        ServiceDied: a service ended first; the command was stopped, as its results could not be trusted.
        ChildFailed: the command ended with another code than 0 while all services lived.
    """
    say(main.name, f"starting, log: {main.log_path}")
    child = Child(main, grace_s)
    try:
        while True:
            code = child.poll()
            if code == 0:
                return code
            services.check()  # first: a command that fails because its service died is not the cause
            if code is not None:
                time.sleep(_BLAME_S)
                services.check()
                raise ChildFailed(f"{main.name!r} failed: {describe_exit(code)}", child)
            time.sleep(_POLL_S)
    finally:
        child.stop()
