"""Containers: processes of Modal's own entrypoint, and handlers of their requests.

They run in a folder with the app's mounted files and without the client's environment. The next call of the
function reuses an idle container, with its process, modules and views of volumes. It ends with its app, or
when another function needs a container.
"""

import asyncio
import codecs
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.functions import layout
from modal_plane.servicer import CALLER, TASK_HEADER, Reply
from modal_plane.state import ENVIRONMENT, App, Bell, Call, Function, State, new_id
from modal_plane.volumes import Commit

SPAWNER_S = 120.0
"""Seconds that a spawned call of a function waits for the one that has spawned it."""
KEPT = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
"""What a container has of this machine's environment: what a process needs to start here."""


@dataclass(frozen=True)
class Outcome:
    status: str
    """success, failure, timeout or terminated; crash and preempted are without an output."""
    result: api_pb2.GenericResult
    data_format: "api_pb2.DataFormat.ValueType" = api_pb2.DATA_FORMAT_UNSPECIFIED


def failed(status: str, text: str) -> Outcome:
    """An outcome that the server itself reports."""
    kind = {
        "timeout": api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT,
        "terminated": api_pb2.GenericResult.GENERIC_STATUS_TERMINATED,
    }.get(status, api_pb2.GenericResult.GENERIC_STATUS_FAILURE)
    return Outcome(status, api_pb2.GenericResult(status=kind, exception=text))


@dataclass
class Job:
    """A function call and its one input."""

    call: Call
    function: Function
    item: api_pb2.FunctionPutInputsItem
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None


@dataclass
class Attempt:
    job: Job
    fetched: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@dataclass
class Container:
    """A process that runs one attempt after the other."""

    id: str
    slot: int
    attempt: Attempt
    """The last one."""
    process: asyncio.subprocess.Process | None = None
    interrupted: bool = False
    retired: bool = False
    """Whether it gets no further input."""
    bell: Bell = field(default_factory=Bell)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        return self.attempt.outcome.done() and not (self.interrupted or self.retired)

    def give(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.bell.ring()

    def retire(self) -> None:
        self.retired = True
        self.bell.ring()

    def kill(self) -> None:
        """End it and what it started in its process group, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, grace: float) -> None:
        self.interrupted = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), grace)
        self.kill()
        await self.gone.wait()


class Containers:
    """Starts containers and answers them. `grace` is the seconds from the interrupt to the kill."""

    def __init__(self, state: State, environment: Mapping[str, str], grace: float) -> None:
        self.grace = grace
        self._state = state
        self._environment = environment
        self._alive: dict[str, Container] = {}
        self._supervisors: set[asyncio.Task[None]] = set()

    async def execute(self, job: Job) -> Outcome:
        """One attempt: returns when its container has sent the output or ended without one."""
        attempt = Attempt(job)
        placing = asyncio.create_task(self._place(attempt))
        try:
            container = await asyncio.shield(placing)
            fetching = asyncio.create_task(attempt.fetched.wait())
            either: set[asyncio.Future[Any]] = {fetching, attempt.outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            fetching.cancel()
            seconds = job.call.spec.timeout
            done, _ = await asyncio.wait({attempt.outcome}, timeout=seconds)
            if not done:
                text = f"Task's current input {job.call.id} hit its timeout of {seconds}s"
                attempt.settle(failed("timeout", text))
                container.kill()
                await container.gone.wait()
            return attempt.outcome.result()
        except asyncio.CancelledError:
            await (await placing).end(self.grace)
            raise

    async def all_gone(self, app: App) -> None:
        """End the app's idle containers, and wait until none of its containers is left."""
        mine = [one for one in self._alive.values() if one.attempt.job.function.app is app]
        for container in mine:
            container.retire()
        for container in mine:
            await container.gone.wait()

    def running(self, call: Call) -> Container:
        """The container that runs the call. Raises LookupError if none does."""
        for container in self._alive.values():
            if container.attempt.job.call is call and not container.attempt.outcome.done():
                return container
        raise LookupError(f"no container runs {call.function} ({call.status})")

    def event(self) -> Commit:
        """A commit by the calling container, now."""
        container = self._caller()
        attempt = container.attempt
        call = attempt.job.call
        return Commit(call.function, call.id, attempt.outcome.done() or container.interrupted)

    def call_of_caller(self) -> Call | None:
        container = self._alive.get(CALLER.get().task_id)
        return container.attempt.job.call if container else None

    async def FunctionGetInputs(self, request: api_pb2.FunctionGetInputsRequest) -> Reply:
        container = self._caller()
        while container.attempt.fetched.is_set():
            if container.retired:
                end = api_pb2.FunctionGetInputsItem(kill_switch=True)
                return dict(inputs=[end])
            await container.bell.wait(60)
        container.attempt.fetched.set()
        job = container.attempt.job
        item = api_pb2.FunctionGetInputsItem(
            input_id=job.call.id,
            input=job.item.input,
            function_call_id=job.call.function_call_id,
            function_call_invocation_type=(
                api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC
                if job.call.spawned
                else api_pb2.FUNCTION_CALL_INVOCATION_TYPE_SYNC
            ),
            retry_count=job.call.attempts - 1,
        )
        return dict(inputs=[item])

    async def FunctionPutOutputs(self, request: api_pb2.FunctionPutOutputsRequest) -> Reply:
        container = self._caller()
        statuses = {
            api_pb2.GenericResult.GENERIC_STATUS_SUCCESS: "success",
            api_pb2.GenericResult.GENERIC_STATUS_TERMINATED: "terminated",
        }
        for output in request.outputs:
            status = statuses.get(output.result.status, "failure")
            container.attempt.settle(Outcome(status, output.result, output.data_format))
        return {}

    async def TaskResult(self, request: api_pb2.TaskResultRequest) -> Reply:
        # The app's file could not be imported, or the container could not be set up from it.
        self._caller().attempt.settle(Outcome("failure", request.result))
        return {}

    async def TunnelStart(self, request: api_pb2.TunnelStartRequest) -> Reply:
        self._caller()
        return dict(host=f"port-{request.port}.modal.invalid", port=443)

    async def TunnelStop(self, request: api_pb2.TunnelStopRequest) -> Reply:
        return dict(exists=True)

    def _caller(self) -> Container:
        task_id = CALLER.get().task_id
        if task_id not in self._alive:
            raise GRPCError(Status.FAILED_PRECONDITION, f"{task_id} is not a running container")
        return self._alive[task_id]

    async def _place(self, attempt: Attempt) -> Container:
        """Give the attempt to an idle container of its function, or to a new one."""
        await self._spawner_ended(attempt.job)
        others = []
        for container in self._alive.values():
            if container.idle and container.attempt.job.function is attempt.job.function:
                container.give(attempt)
                return container
            if container.idle:
                others.append(container)
        for container in others:
            container.retire()
        for container in others:
            await container.gone.wait()
        return await self._start(attempt)

    async def _spawner_ended(self, job: Job) -> None:
        """Let a call of the same function that has spawned this one end: then its slot is free."""
        spawners = [
            container.attempt
            for container in self._alive.values()
            if container.attempt.job.call.id == job.call.parent
            and container.attempt.job.function.name == job.function.name
        ]
        if job.call.spawned and spawners:
            await asyncio.wait({spawners[0].outcome}, timeout=SPAWNER_S)

    async def _start(self, attempt: Attempt) -> Container:
        call = attempt.job.call
        slot = self._free_slot()
        container = Container(new_id("ta"), slot, attempt)
        self._alive[container.id] = container
        root = self._state.folder / "containers" / str(slot)
        self._fill(root, call.spec.files)
        folders = {"/root": root / "root"}
        for path, volume in call.spec.volumes.items():
            folders[path] = await asyncio.to_thread(volume.mount, container.id, slot)
        arguments = self._arguments(container, root.with_suffix(".arguments"))
        workdir = root / call.spec.image.workdir.lstrip("/")
        workdir.mkdir(parents=True, exist_ok=True)
        container.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "modal._container_entrypoint",
            cwd=workdir,
            env=self._process_environment(container, root, folders, arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        supervisor = asyncio.create_task(self._supervise(container, container.process))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return container

    async def _supervise(self, container: Container, process: asyncio.subprocess.Process) -> None:
        pumps = [
            asyncio.create_task(self._pump(container, stream, descriptor))
            for stream, descriptor in (
                (process.stdout, api_pb2.FILE_DESCRIPTOR_STDOUT),
                (process.stderr, api_pb2.FILE_DESCRIPTOR_STDERR),
            )
            if stream is not None
        ]
        # Its own `wait` would last until all who hold its pipes have ended.
        while (code := process.returncode) is None:
            await asyncio.sleep(0.02)
        container.kill()
        await asyncio.to_thread(_kill_what_is_left, container.id)
        # A process that has left the group can still hold the pipes.
        _, open_pumps = await asyncio.wait(pumps, timeout=5)
        for pump in open_pumps:
            pump.cancel()
        for volume in container.attempt.job.call.spec.volumes.values():
            volume.views.pop(container.id)
        status = "preempted" if container.interrupted else "crash"
        container.attempt.settle(failed(status, f"Runner failed with exit code: {code}"))
        del self._alive[container.id]
        container.gone.set()

    async def _pump(
        self,
        container: Container,
        stream: asyncio.StreamReader,
        descriptor: "api_pb2.FileDescriptor.ValueType",
    ) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := await stream.read(2**16):
            text = decoder.decode(chunk)
            call, function = container.attempt.job.call, container.attempt.job.function
            call.logs += text
            item = api_pb2.TaskLogs(
                data=text,
                timestamp=time.time(),
                timestamp_ns=time.time_ns(),
                file_descriptor=descriptor,
                function_call_id=call.function_call_id,
                input_id=call.id,
            )
            function.app.log.add(
                api_pb2.TaskLogsBatch(task_id=container.id, function_id=function.id, items=[item])
            )

    def _free_slot(self) -> int:
        """The first number that no container has: the paths of its files are reused."""
        taken = {container.slot for container in self._alive.values()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _fill(self, root: Path, files: dict[str, str]) -> None:
        shutil.rmtree(root, ignore_errors=True)
        (root / "root").mkdir(parents=True)
        for path, sha256 in files.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._state.contents.path(sha256), place)

    def _arguments(self, container: Container, path: Path) -> Path:
        function = container.attempt.job.function
        definition = function.definition
        arguments = api_pb2.ContainerArguments(
            task_id=container.id,
            function_id=function.id,
            app_id=function.app.id,
            function_def=definition,
            environment_name=ENVIRONMENT,
            app_layout=layout(self._state, function.app, definition),
        )
        path.write_bytes(arguments.SerializeToString())
        return path

    def _process_environment(
        self, container: Container, root: Path, folders: Mapping[str, Path], arguments: Path
    ) -> dict[str, str]:
        spec = container.attempt.job.call.spec
        mounts = {mount_variable(path): str(folders[path]) for path in spec.volumes}
        given = dict(spec.image.environment)
        for secret in spec.secrets:
            given |= secret.values
        given = {name: _here(value, folders) for name, value in given.items()}
        python_path = [str(root / "root"), given.pop("PYTHONPATH", ""), self._environment["PYTHONPATH"]]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {
            **environment,
            "HOME": str(root / "root"),
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            **given,
            **mounts,
            "PYTHONPATH": os.pathsep.join(folder for folder in python_path if folder),
            "DRZERO_CONTAINER_ROOT": str(root),
            "MODAL_PLANE_PID": str(os.getpid()),
            "MODAL_IS_REMOTE": "1",
            "MODAL_TASK_ID": container.id,
            "MODAL_IMAGE_ID": spec.image.id,
            "MODAL_ENVIRONMENT": ENVIRONMENT,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(arguments),
            "MODAL_OVERRIDE_HEADERS": f"{TASK_HEADER}:{container.id}",
        }


def _kill_what_is_left(task_id: str) -> None:
    """Kill the processes of a container that has ended: at Modal none outlives it."""
    mark = f"MODAL_TASK_ID={task_id}".encode()
    roots = []
    for entry in Path("/proc").iterdir():
        # A process that ends meanwhile, or another user's.
        with contextlib.suppress(psutil.Error, OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                roots.append(psutil.Process(int(entry.name)))
    left = set(roots)
    for process in roots:
        # Those that set their own title have lost their environment.
        with contextlib.suppress(psutil.Error):
            left.update(process.children(recursive=True))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(left), timeout=10)


def _here(value: str, folders: Mapping[str, Path]) -> str:
    """The value with each of its paths in the container, between colons, replaced by its path here."""
    parts = value.split(":")
    for number, part in enumerate(parts):
        for path, folder in folders.items():
            if part == path or part.startswith(f"{path}/"):
                parts[number] = f"{folder}{part[len(path) :]}"
    return ":".join(parts)


def mount_variable(path: str) -> str:
    """The environment variable that has the folder of a mount path: `/corpus` is DRZERO_MOUNT_CORPUS."""
    return "DRZERO_MOUNT_" + re.sub(r"\W+", "_", path.strip("/")).upper()
