"""Handlers of calls: attempts, retries, replacements, outputs.

A container attempts an input, or a test's function answers it. A failure or time-out is retried after its
delay, up to the function's `retries`. A container that dies without an output is replaced once, and a
preempted one every time, which is no retry.
"""

import asyncio
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.blobs import Blobs
from modal_plane.containers import Containers, Job, Outcome, failed
from modal_plane.functions import FunctionHandlers
from modal_plane.servicer import Caller
from modal_plane.state import App, Bell, Call, Function, State, new_id

REPLACEMENTS = 1
"""Containers that are replaced under an input before it fails. Modal goes by a rate it does not publish."""
SHORTEST_DELAY = 1.0
"""Seconds before a retry, at least."""


@dataclass
class FunctionCall:
    id: str
    function: Function
    spawned: bool
    parent: str | None
    jobs: list[Job] = field(default_factory=list)
    completed: list[Job] = field(default_factory=list)
    bell: Bell = field(default_factory=Bell)


class Calls:
    def __init__(
        self, state: State, blobs: Blobs, functions: FunctionHandlers, containers: Containers
    ) -> None:
        self._state = state
        self._blobs = blobs
        self._functions = functions
        self._containers = containers
        self._by_id: dict[str, FunctionCall] = {}
        self.answers: dict[str, Callable[..., Any]] = {}
        self.bell = Bell()
        """Rings whenever a call ends."""

    def running(self, app: App, of_client: bool = False) -> list[Job]:
        """The app's calls without an output. With `of_client`, only calls that end with the client."""
        return [
            job
            for function_call in self._by_id.values()
            for job in function_call.jobs
            if job.outcome is None
            and function_call.function.app is app
            and not (of_client and (function_call.spawned or function_call.parent))
        ]

    async def end(self, jobs: list[Job]) -> None:
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def FunctionMap(
        self, request: api_pb2.FunctionMapRequest, caller: Caller
    ) -> api_pb2.FunctionMapResponse:
        function = self._state.functions[request.function_id]
        parent = self._containers.call_of(caller)
        spawned = request.function_call_invocation_type == api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC
        function_call = FunctionCall(new_id("fc"), function, spawned, parent.id if parent else None)
        self._by_id[function_call.id] = function_call
        return api_pb2.FunctionMapResponse(
            function_call_id=function_call.id,
            pipelined_inputs=[self._put(function_call, item) for item in request.pipelined_inputs],
            retry_policy=function.definition.retry_policy,
            function_call_jwt=function_call.id,
            sync_client_retries_enabled=False,
        )

    async def FunctionPutInputs(
        self, request: api_pb2.FunctionPutInputsRequest, caller: Caller
    ) -> api_pb2.FunctionPutInputsResponse:
        function_call = self._function_call(request.function_call_id)
        return api_pb2.FunctionPutInputsResponse(
            inputs=[self._put(function_call, item) for item in request.inputs]
        )

    async def FunctionGetOutputs(
        self, request: api_pb2.FunctionGetOutputsRequest, caller: Caller
    ) -> api_pb2.FunctionGetOutputsResponse:
        function_call = self._function_call(request.function_call_id)
        seen = int((request.last_entry_id or "0").split("-")[0])
        last = request.end_idx if request.HasField("end_idx") else sys.maxsize
        deadline = asyncio.get_running_loop().time() + request.timeout
        while True:
            outputs = [
                _output(job)
                for job in function_call.completed[seen:]
                if request.start_idx <= job.index <= last
            ]
            remaining = deadline - asyncio.get_running_loop().time()
            if outputs or remaining <= 0:
                return api_pb2.FunctionGetOutputsResponse(
                    outputs=outputs,
                    idxs=[output.idx for output in outputs],
                    last_entry_id=f"{len(function_call.completed)}-0",
                    num_unfinished_inputs=len(function_call.jobs) - len(function_call.completed),
                )
            await function_call.bell.wait(remaining)

    async def FunctionCallFromId(
        self, request: api_pb2.FunctionCallFromIdRequest, caller: Caller
    ) -> api_pb2.FunctionCallFromIdResponse:
        function_call = self._function_call(request.function_call_id)
        return api_pb2.FunctionCallFromIdResponse(
            function_call_id=function_call.id, num_inputs=len(function_call.jobs)
        )

    def _function_call(self, function_call_id: str) -> FunctionCall:
        if function_call_id not in self._by_id:
            raise GRPCError(Status.NOT_FOUND, f"Function call {function_call_id} not found")
        return self._by_id[function_call_id]

    def _put(
        self, function_call: FunctionCall, item: api_pb2.FunctionPutInputsItem
    ) -> api_pb2.FunctionPutInputsResponseItem:
        function = function_call.function
        arguments, _ = pickle.loads(self._content(item.input.args, item.input.args_blob_id))
        call = Call(
            id=new_id("in"),
            app_id=function.app.id,
            function_call_id=function_call.id,
            function=function.name,
            spec=self._functions.spec(function),
            args=arguments,
            spawned=function_call.spawned,
            parent=function_call.parent,
        )
        job = Job(call, function, item.idx, item.input)
        function_call.jobs.append(job)
        self._state.calls.append(call)
        job.task = asyncio.create_task(self._attend(job, function_call))
        return api_pb2.FunctionPutInputsResponseItem(idx=item.idx, input_id=call.id, input_jwt=call.id)

    async def _attend(self, job: Job, function_call: FunctionCall) -> None:
        policy = job.function.definition.retry_policy
        retries = deaths = 0
        try:
            while True:
                job.call.attempts += 1
                outcome = await self._attempt(job)
                if outcome.status in ("failure", "timeout") and retries < policy.retries:
                    retries += 1
                    delay = policy.initial_delay_ms / 1000 * policy.backoff_coefficient ** (retries - 1)
                    await asyncio.sleep(max(delay, SHORTEST_DELAY))
                elif outcome.status == "crash" and deaths < REPLACEMENTS:
                    deaths += 1
                elif outcome.status != "preempted":
                    break
        except asyncio.CancelledError:
            outcome = failed("terminated", "The call was cancelled")
        # The plane itself is broken: the client must not wait for ever, and the test must fail.
        except Exception as error:
            self._state.failures.append(traceback.format_exc())
            outcome = failed("failure", f"the loopback control plane broke: {error!r}")
        self._finish(job, outcome)
        function_call.completed.append(job)
        function_call.bell.ring()
        self.bell.ring()

    async def _attempt(self, job: Job) -> Outcome:
        answer = self.answers.get(job.call.function)
        if answer is None:
            return await self._containers.execute(job)
        try:
            value = await asyncio.to_thread(answer, *job.call.args)
        # Whatever the test's function raises is the call's failure.
        except Exception as error:
            result = api_pb2.GenericResult(
                status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE,
                exception=repr(error),
                traceback=traceback.format_exc(),
                data=pickle.dumps(error, 4),
            )
            return Outcome("failure", result, api_pb2.DATA_FORMAT_PICKLE)
        result = api_pb2.GenericResult(
            status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS, data=pickle.dumps(value, 4)
        )
        return Outcome("success", result, api_pb2.DATA_FORMAT_PICKLE)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        result, call = outcome.result, job.call
        call.status = "failure" if outcome.status == "crash" else outcome.status
        if call.status == "success":
            call.result = pickle.loads(self._content(result.data, result.data_blob_id))

    def _content(self, data: bytes, blob_id: str) -> bytes:
        return self._state.contents.read(self._blobs.sha256(blob_id)) if blob_id else data


def _output(job: Job) -> api_pb2.FunctionGetOutputsItem:
    assert job.outcome is not None
    return api_pb2.FunctionGetOutputsItem(
        result=job.outcome.result,
        idx=job.index,
        input_id=job.call.id,
        data_format=job.outcome.data_format,
        retry_count=job.call.attempts - 1,
    )
