"""Handlers of calls: attempts, retries, replacements, outputs.

A container attempts an input, or a test's function answers it. A failure or time-out is retried after its
delay, up to the function's `retries`. A container that dies without an output is replaced once, and a
preempted one every time, which is no retry.
"""

import asyncio
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.blobs import Blobs
from modal_plane.containers import Containers, Job, Outcome, failed
from modal_plane.functions import FunctionHandlers
from modal_plane.servicer import Reply
from modal_plane.state import App, Bell, Call, State, new_id

REPLACEMENTS = 1
"""Containers that are replaced under an input before it fails. Modal goes by a rate it does not publish."""
SHORTEST_DELAY = 1.0
"""Seconds before a retry, at least."""


class Calls:
    def __init__(
        self, state: State, blobs: Blobs, functions: FunctionHandlers, containers: Containers
    ) -> None:
        self._state = state
        self._blobs = blobs
        self._functions = functions
        self._containers = containers
        self._jobs: dict[str, Job] = {}
        """By function call id. Here a call has one input."""
        self.answers: dict[str, Callable[..., Any]] = {}
        self.bell = Bell()
        """Rings whenever a call ends."""

    def running(self, app: App, of_client: bool = False) -> list[Job]:
        """The app's calls without an output. With `of_client`, only calls that end with the client."""
        mine = [job for job in self._jobs.values() if job.outcome is None and job.function.app is app]
        return [job for job in mine if not (of_client and (job.call.spawned or job.call.parent))]

    async def end(self, jobs: list[Job]) -> None:
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def FunctionMap(self, request: api_pb2.FunctionMapRequest) -> Reply:
        function, (item,) = self._state.functions[request.function_id], request.pipelined_inputs
        parent = self._containers.call_of_caller()
        arguments, _ = pickle.loads(self._content(item.input.args, item.input.args_blob_id))
        call = Call(
            id=new_id("in"),
            app_id=function.app.id,
            function_call_id=new_id("fc"),
            function=function.name,
            spec=self._functions.spec(function),
            args=arguments,
            spawned=request.function_call_invocation_type == api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC,
            parent=parent.id if parent else None,
        )
        job = self._jobs[call.function_call_id] = Job(call, function, item)
        self._state.calls.append(call)
        job.task = asyncio.create_task(self._attend(job))
        return dict(
            function_call_id=call.function_call_id,
            pipelined_inputs=[
                api_pb2.FunctionPutInputsResponseItem(idx=item.idx, input_id=call.id, input_jwt=call.id)
            ],
            retry_policy=function.definition.retry_policy,
            function_call_jwt=call.function_call_id,
            sync_client_retries_enabled=False,
        )

    async def FunctionGetOutputs(self, request: api_pb2.FunctionGetOutputsRequest) -> Reply:
        job = self._job(request.function_call_id)
        assert job.task is not None
        await asyncio.wait({job.task}, timeout=request.timeout)
        outputs = [] if job.outcome is None else [_output(job, job.outcome)]
        return dict(
            outputs=outputs,
            idxs=[output.idx for output in outputs],
            last_entry_id=f"{len(outputs)}-0",
            num_unfinished_inputs=1 - len(outputs),
        )

    async def FunctionCallFromId(self, request: api_pb2.FunctionCallFromIdRequest) -> Reply:
        job = self._job(request.function_call_id)
        return dict(function_call_id=job.call.function_call_id, num_inputs=1)

    def _job(self, function_call_id: str) -> Job:
        if function_call_id not in self._jobs:
            raise GRPCError(Status.NOT_FOUND, f"Function call {function_call_id} not found")
        return self._jobs[function_call_id]

    async def _attend(self, job: Job) -> None:
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
        job.outcome, call = outcome, job.call
        call.status = "failure" if outcome.status == "crash" else outcome.status
        if call.status == "success":
            call.result = pickle.loads(self._content(outcome.result.data, outcome.result.data_blob_id))
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

    def _content(self, data: bytes, blob_id: str) -> bytes:
        return self._state.contents.read(self._blobs.sha256(blob_id)) if blob_id else data


def _output(job: Job, outcome: Outcome) -> api_pb2.FunctionGetOutputsItem:
    return api_pb2.FunctionGetOutputsItem(
        result=outcome.result,
        idx=job.item.idx,
        input_id=job.call.id,
        data_format=outcome.data_format,
        retry_count=job.call.attempts - 1,
    )
