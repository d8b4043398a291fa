"""Handlers of functions as the app defines them, and of their variants from `with_options`, by other ids."""

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.servicer import Reply
from modal_plane.state import App, Function, FunctionSpec, State, new_id


class FunctionHandlers:
    def __init__(self, state: State) -> None:
        self._state = state
        self._variants: dict[tuple[str, bytes], Function] = {}

    async def FunctionPrecreate(self, request: api_pb2.FunctionPrecreateRequest) -> Reply:
        function = self._declare(request.app_id, request.existing_function_id, request)
        return dict(function_id=function.id, handle_metadata=function.handle)

    async def FunctionCreate(self, request: api_pb2.FunctionCreateRequest) -> Reply:
        ranked = [one.function for one in request.function_data.ranked_functions]
        (definition,) = ranked or [request.function]
        function = self._declare(request.app_id, request.existing_function_id, definition)
        if definition.webhook_config.type:
            function.handle.web_url = f"https://{definition.function_name}.modal.invalid"
        function.definition = definition
        return dict(
            function_id=function.id,
            function=definition,
            handle_metadata=function.handle,
            function_data=api_pb2.FunctionData(
                module_name=definition.module_name,
                function_name=definition.function_name,
                function_type=definition.function_type,
                timeout_secs=definition.timeout_secs,
                ranked_functions=[api_pb2.FunctionData.RankedFunction(rank=0, function=definition)],
            ),
        )

    async def FunctionBindParams(self, request: api_pb2.FunctionBindParamsRequest) -> Reply:
        base, options = self._function(request.function_id), request.function_options
        # The same variant for the same options: its idle containers are reused.
        key = base.id, options.SerializeToString(deterministic=True)
        if key not in self._variants:
            variant = Function(new_id("fu"), base.app, base.handle, _merged(base.definition, options))
            self._state.functions[variant.id] = self._variants[key] = variant
        bound = self._variants[key].id
        return dict(bound_function_id=bound, handle_metadata=base.handle)

    def spec(self, function: Function) -> FunctionSpec:
        definition, resources = function.definition, function.definition.resources
        gpu, scaling = resources.gpu_config, definition.autoscaler_settings
        assert not any(mount.read_only for mount in definition.volume_mounts)
        return FunctionSpec(
            gpu=(gpu.gpu_type, gpu.count) if gpu.count else None,
            cpu=resources.milli_cpu / 1000,
            memory=resources.memory_mb,
            timeout=definition.timeout_secs,
            startup_timeout=definition.startup_timeout_secs,
            volumes={
                mount.mount_path: self._state.volume_of(mount.volume_id) for mount in definition.volume_mounts
            },
            secrets=tuple(self._state.secret(secret_id) for secret_id in definition.secret_ids),
            image=self._state.images[definition.image_id],
            files=self._state.files(list(definition.mount_ids)),
            regions=tuple(definition.scheduler_placement.regions),
            max_containers=scaling.max_containers or definition.concurrency_limit or None,
            min_containers=scaling.min_containers or definition.warm_pool_size or None,
            web_server_port=definition.webhook_config.web_server_port or None,
        )

    def _function(self, function_id: str) -> Function:
        if function_id not in self._state.functions:
            raise GRPCError(Status.NOT_FOUND, f"Function {function_id} not found")
        return self._state.functions[function_id]

    def _declare(
        self, app_id: str, function_id: str, request: api_pb2.FunctionPrecreateRequest | api_pb2.Function
    ) -> Function:
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
        function = Function(new_id("fu"), self._state.apps[app_id], handle)
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
    for name in given.keys() & {"timeout_secs", "concurrency_limit"}:
        setattr(merged, name, given[name])
    if options.replace_secret_ids:
        merged.secret_ids[:] = options.secret_ids
    return merged
