"""Handlers of Dicts: tables that clients and containers share, where a key can be written only once."""

from collections.abc import AsyncIterator

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.servicer import Reply
from modal_plane.state import State, content_id


class DictHandlers:
    """Handlers of Dicts. Entries do not expire here. Modal keeps them for a week after their last use."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def DictGetOrCreate(self, request: api_pb2.DictGetOrCreateRequest) -> Reply:
        name = request.deployment_name
        dict_id = content_id("di", name.encode())
        self._state.dicts.setdefault(dict_id, {})
        return dict(dict_id=dict_id, metadata=api_pb2.DictMetadata(name=name))

    async def DictUpdate(self, request: api_pb2.DictUpdateRequest) -> Reply:
        entries = self._entries(request.dict_id)
        new = {item.key: item.value for item in request.updates}
        created = not new.keys() & entries.keys()
        if created or not request.if_not_exists:
            entries |= new
        return dict(created=created)

    async def DictGet(self, request: api_pb2.DictGetRequest) -> Reply:
        value = self._entries(request.dict_id).get(request.key)
        return dict(found=value is not None, value=value)

    async def DictContents(self, request: api_pb2.DictContentsRequest) -> AsyncIterator[api_pb2.DictEntry]:
        for key, value in list(self._entries(request.dict_id).items()):
            yield api_pb2.DictEntry(key=key, value=value)

    def _entries(self, dict_id: str) -> dict[bytes, bytes]:
        if dict_id not in self._state.dicts:
            raise GRPCError(Status.NOT_FOUND, f"Dict {dict_id} not found")
        return self._state.dicts[dict_id]
