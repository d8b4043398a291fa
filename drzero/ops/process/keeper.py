"""The keeper: a small parent process that leaves no descendant of a command running. Linux only.

    python drzero/ops/process/keeper.py PARENT_PID GRACE_SECONDS COMMAND [ARGUMENT ...]

It gets SIGTERM when its starting thread ends (PR_SET_PDEATHSIG), and as a *subreaper* adopts descendants that
leave the session. It imports nothing of this package, so the command sees the caller's folder and PYTHONPATH.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LEFTOVER_GRACE_S = 3.0  # short, because a crash is reported only after the leftovers have ended
_STOP = {signal.SIGTERM, signal.SIGINT}
_OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""What a script's background job ignores. The command must not: SGLang's engine in veRL ends by SIGQUIT."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(parent: int, grace_s: float, command: list[str]) -> None:
    """Run `command` until it ends, `parent` dies or a stop signal arrives. Then exit as the command did."""
    # Wait for signals instead of handling them, so that no handler interrupts the bookkeeping below.
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP | {signal.SIGCHLD})
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if not die_with(parent, signal.SIGTERM):
        sys.exit(f"keeper: the supervisor (pid {parent}) is gone; {command[0]} was not started")

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for signum in _OF_A_TERMINAL:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited)

    try:
        # The keeper has one thread, so running Python between fork and exec is safe here.
        child = subprocess.Popen(command, process_group=0, preexec_fn=prepare)
    except OSError as error:
        print(f"Error: cannot start {command[0]!r}: {error.strerror}", flush=True)
        sys.exit(127)
    status = _keep(child, grace_s)
    if os.WIFSIGNALED(status):
        # The command has dumped its core already; the keeper's core is useless.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signum = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        os.kill(os.getpid(), signum)
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def die_with(parent: int, signum: signal.Signals) -> bool:
    """Make the kernel send `signum` to this process when its parent dies. False if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def _keep(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for `child`, end its whole tree, and return its wait status."""
    status: int | None = None
    deadline = float("inf")  # after it, SIGKILL
    while True:
        ending = deadline < float("inf")
        caught = signal.sigtimedwait(_STOP | {signal.SIGCHLD}, 0.05 if ending else 60)
        has_ended = False
        with suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # including adopted children
                if ended[0] == child.pid:
                    has_ended, status = True, ended[1]
        if has_ended:
            deadline = min(deadline, time.monotonic() + min(grace_s, _LEFTOVER_GRACE_S))
            _signal_all(signal.SIGTERM)
        elif caught and caught.si_signo in _STOP and not ending:
            deadline = time.monotonic() + grace_s
            os.killpg(child.pid, signal.SIGTERM)
        if status is not None and not psutil.Process().children():
            return status
        if time.monotonic() > deadline:
            _signal_all(signal.SIGKILL)


def _signal_all(signum: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
