"""Handlers of functions as the app defines them, and of the variants from `with_options`.

A variant has its own id, a base function, and options that replace the base's values.

"""

from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.servicer import Caller
from modal_plane.state import App, Function, FunctionSpec, MountedVolume, State, new_id

LONGEST_TIMEOUT = 24 * 60 * 60
"""Modal's limit for one attempt, in seconds."""
MOST_CORES, MOST_MEMORY, MOST_RETRIES = 64, 344064, 10
"""Limits of a container, the memory in MiB. Modal refuses what exceeds its own, which it does not publish."""
REGIONS = ("us", "eu", "ap", "uk", "ca", "me", "sa", "af", "mx", "jp")
"""First part of each region's name."""


class FunctionHandlers:
    """Handlers of definitions and variants."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._variants: dict[tuple[str, bytes], Function] = {}

    async def FunctionPrecreate(
        self, request: api_pb2.FunctionPrecreateRequest, caller: Caller
    ) -> api_pb2.FunctionPrecreateResponse:
        function = self._declare(request.app_id, request.existing_function_id, request)
        return api_pb2.FunctionPrecreateResponse(function_id=function.id, handle_metadata=function.handle)

    async def FunctionCreate(
        self, request: api_pb2.FunctionCreateRequest, caller: Caller
    ) -> api_pb2.FunctionCreateResponse:
        data = request.function_data
        definitions = [ranked.function for ranked in data.ranked_functions] or [request.function]
        first = definitions[0]
        if first.is_class or first.is_server:
            raise GRPCError(
                Status.UNIMPLEMENTED,
                f"{first.function_name}: the plane has functions, no classes or servers of containers",
            )
        _check(first)
        function = self._declare(request.app_id, request.existing_function_id, first)
        if first.webhook_config.type:
            function.handle.web_url = f"https://{first.function_name}.modal.invalid"
        function.definitions = definitions
        ranked = [
            api_pb2.FunctionData.RankedFunction(rank=rank, function=definition)
            for rank, definition in enumerate(definitions)
        ]
        return api_pb2.FunctionCreateResponse(
            function_id=function.id,
            function=first,
            handle_metadata=function.handle,
            function_data=api_pb2.FunctionData(
                module_name=first.module_name,
                function_name=first.function_name,
                function_type=first.function_type,
                timeout_secs=first.timeout_secs,
                ranked_functions=ranked,
            ),
        )

    async def FunctionBindParams(
        self, request: api_pb2.FunctionBindParamsRequest, caller: Caller
    ) -> api_pb2.FunctionBindParamsResponse:
        base, options = self._function(request.function_id), request.function_options
        # The same variant for the same options: its idle containers are reused.
        key = base.id, options.SerializeToString(deterministic=True)
        if key in self._variants:
            known = self._variants[key]
            return api_pb2.FunctionBindParamsResponse(bound_function_id=known.id, handle_metadata=base.handle)
        variant = Function(
            id=new_id("fu"),
            app=base.app,
            handle=base.handle,
            definitions=[_merged(definition, options) for definition in base.definitions],
            base=base,
            options=self._named(options),
        )
        _check(variant.definitions[0])
        self._state.functions[variant.id] = self._variants[key] = variant
        return api_pb2.FunctionBindParamsResponse(bound_function_id=variant.id, handle_metadata=base.handle)

    def spec(self, function: Function) -> FunctionSpec:
        """The resources the function or variant requests."""
        first = function.definitions[0]
        resources, retries = first.resources, first.retry_policy
        scaling = first.autoscaler_settings.max_containers or first.concurrency_limit
        gpus = [definition.resources.gpu_config for definition in function.definitions]
        return FunctionSpec(
            name=function.name,
            gpus=tuple(dict.fromkeys((gpu.gpu_type, gpu.count) for gpu in gpus if gpu.count)),
            cpu=_range(resources.milli_cpu / 1000, resources.milli_cpu_max / 1000),
            memory=_range(resources.memory_mb, resources.memory_mb_max),
            ephemeral_disk=resources.ephemeral_disk_mb or None,
            timeout=first.timeout_secs,
            startup_timeout=first.startup_timeout_secs,
            retries=retries.retries,
            volumes=self._volumes(first.volume_mounts),
            secrets=tuple(self._state.secret(secret_id) for secret_id in first.secret_ids),
            image=self._state.images[first.image_id],
            files=self._state.files(list(first.mount_ids)),
            regions=tuple(first.scheduler_placement.regions),
            nonpreemptible=first.scheduler_placement.nonpreemptible,
            cloud=first.cloud_provider_str or None,
            max_containers=scaling or None,
            min_containers=first.autoscaler_settings.min_containers or first.warm_pool_size or None,
            web_server_port=first.webhook_config.web_server_port or None,
        )

    def _volumes(self, mounts: Any) -> dict[str, MountedVolume]:
        return {
            mount.mount_path: MountedVolume(
                self._state.volume_of(mount.volume_id).name, mount.read_only, mount.sub_path or None
            )
            for mount in mounts
        }

    def _named(self, options: api_pb2.FunctionOptions) -> dict[str, Any]:
        """Only the options that are set, by their names in `with_options`."""
        resources, gpu = options.resources, options.resources.gpu_config
        named = {
            "gpu": (gpu.gpu_type, gpu.count) if gpu.count else None,
            "cpu": _range(resources.milli_cpu / 1000, resources.milli_cpu_max / 1000),
            "memory": _range(resources.memory_mb, resources.memory_mb_max),
            "timeout": options.timeout_secs or None,
            "retries": options.retry_policy.retries if options.HasField("retry_policy") else None,
            "region": tuple(options.scheduler_placement.regions) or None,
            "cloud": options.cloud_provider_str or None,
            "max_containers": options.concurrency_limit or None,
            "secrets": tuple(self._state.secret(secret_id) for secret_id in options.secret_ids) or None,
            "volumes": self._volumes(options.volume_mounts) or None,
        }
        return {name: value for name, value in named.items() if value is not None}

    def _function(self, function_id: str) -> Function:
        if function_id not in self._state.functions:
            raise GRPCError(Status.NOT_FOUND, f"Function {function_id} not found")
        return self._state.functions[function_id]

    def _declare(
        self, app_id: str, function_id: str, request: api_pb2.FunctionPrecreateRequest | api_pb2.Function
    ) -> Function:
        """The function of the id, or a new one."""
        if function_id:
            return self._function(function_id)
        handle = api_pb2.FunctionHandleMetadata(
            function_name=request.function_name,
            function_type=request.function_type,
            definition_id=new_id("de"),
            function_schema=request.function_schema,
            supported_input_formats=request.supported_input_formats,
            supported_output_formats=request.supported_output_formats,
            app_id=app_id,
        )
        function = Function(id=new_id("fu"), app=self._state.apps[app_id], handle=handle)
        self._state.functions[function.id] = function
        return function


def layout(state: State, app: App, definition: api_pb2.Function) -> api_pb2.AppLayout:
    """The part of the app for a container: its functions, and the identifiers of its objects."""
    objects = [
        api_pb2.Object(object_id=function.id, function_handle_metadata=function.handle)
        for function in app.functions.values()
    ]
    for dependency in definition.object_dependencies:
        known = api_pb2.Object(object_id=dependency.object_id)
        if known.object_id.startswith("vo-"):
            known.volume_metadata.CopyFrom(state.volume_of(known.object_id).metadata())
        objects.append(known)
    return api_pb2.AppLayout(
        objects=objects, function_ids={name: function.id for name, function in app.functions.items()}
    )


def _merged(definition: api_pb2.Function, options: api_pb2.FunctionOptions) -> api_pb2.Function:
    """The definition with the options over it, as far as they are set."""
    given = {field.name: value for field, value in options.ListFields()}
    merged = api_pb2.Function.FromString(definition.SerializeToString())
    merged.resources.MergeFrom(options.resources)
    for name in given.keys() & {"retry_policy", "scheduler_placement"}:
        getattr(merged, name).CopyFrom(given[name])
    for name in given.keys() & {"timeout_secs", "concurrency_limit", "cloud_provider_str"}:
        setattr(merged, name, given[name])
    if options.replace_volume_mounts:
        del merged.volume_mounts[:]
        merged.volume_mounts.extend(options.volume_mounts)
    if options.replace_secret_ids:
        merged.secret_ids[:] = options.secret_ids
    return merged


def _range(request: Any, limit: Any) -> Any:
    """None, the request, or the request and the limit."""
    return (request, limit) if limit else (request or None)


def _check(definition: api_pb2.Function) -> None:
    """Refuse what Modal does not offer.

    Raises:
        GRPCError: INVALID_ARGUMENT, with the first fault.
    """
    resources, placement = definition.resources, definition.scheduler_placement
    cores = max(resources.milli_cpu, resources.milli_cpu_max) / 1000
    memory = max(resources.memory_mb, resources.memory_mb_max)
    unknown = [region for region in placement.regions if region.split("-")[0] not in REGIONS]
    faults = {
        f"timeout must be between 1 and {LONGEST_TIMEOUT} seconds": not (
            1 <= definition.timeout_secs <= LONGEST_TIMEOUT
        ),
        f"CPU must be at most {MOST_CORES} cores, not {cores}": cores > MOST_CORES,
        f"memory must be at most {MOST_MEMORY} MiB, not {memory}": memory > MOST_MEMORY,
        f"retries must be at most {MOST_RETRIES}": definition.retry_policy.retries > MOST_RETRIES,
        f"no such region: {unknown}": bool(unknown),
        "nonpreemptible is not supported for GPU Functions": placement.nonpreemptible
        and resources.gpu_config.count > 0,
    }
    for fault, is_so in faults.items():
        if is_so:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{definition.function_name}: {fault}")
