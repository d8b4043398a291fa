"""Handlers of secrets, local files ("mounts") and images."""

import hashlib

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.servicer import Reply
from modal_plane.state import ENVIRONMENT, Image, Layer, SecretUse, State, content_id, new_id

BUILDER_VERSION = "2025.06"
"""Version of Modal's image builder: which Dockerfile commands the client makes of `Image`'s methods."""


class ObjectHandlers:
    def __init__(self, state: State) -> None:
        self._state = state

    async def SecretGetOrCreate(self, request: api_pb2.SecretGetOrCreateRequest) -> Reply:
        name = request.deployment_name
        if name and name not in self._state.secrets:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' not found in environment '{ENVIRONMENT}'")
        secret_id = content_id("st", name.encode()) if name else new_id("st")
        if not name:
            self._state.anonymous_secrets[secret_id] = SecretUse(None, dict(request.env_dict))
        keys = sorted(self._state.secret(secret_id).values)
        metadata = api_pb2.SecretMetadata(name=name, keys=keys, environment_name=ENVIRONMENT)
        return dict(secret_id=secret_id, metadata=metadata)

    async def MountBatchedCheckExistence(self, request: api_pb2.MountBatchedCheckExistenceRequest) -> Reply:
        missing = [sha256 for sha256 in request.sha256_hex_hashes if sha256 not in self._state.contents]
        return dict(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: api_pb2.MountPutFileRequest) -> Reply:
        if request.WhichOneof("data_oneof") == "data":
            self._state.contents.add(request.data)
        return dict(exists=request.sha256_hex in self._state.contents)

    async def MountGetOrCreate(self, request: api_pb2.MountGetOrCreateRequest) -> Reply:
        # A named mount is one of Modal's own: its client, a Python. It exists and has no files.
        files = tuple(sorted(request.files, key=lambda file: file.filename))
        content = request.deployment_name + "".join(
            f"{file.filename} {file.sha256_hex} {file.mode}\n" for file in files
        )
        mount_id = content_id("mo", content.encode())
        self._state.mounts[mount_id] = files
        checksum = hashlib.sha256(content.encode()).hexdigest()
        return dict(
            mount_id=mount_id,
            handle_metadata=api_pb2.MountHandleMetadata(content_checksum_sha256_hex=checksum),
        )

    async def ImageGetOrCreate(self, request: api_pb2.ImageGetOrCreateRequest) -> Reply:
        step = request.image
        layer = Layer(
            commands=tuple(step.dockerfile_commands),
            context_files={file.filename: file.data for file in step.context_files},
            secrets=tuple(self._state.secret(secret_id) for secret_id in step.secret_ids),
        )
        # Modal identifies a step by its content; an anonymous secret has another id in each run.
        content = api_pb2.Image.FromString(step.SerializeToString())
        content.ClearField("secret_ids")
        image_id = content_id("im", content.SerializeToString(deterministic=True))
        if image_id not in self._state.images:
            base = tuple(
                under for parent in step.base_images for under in self._state.images[parent.image_id].layers
            )
            self._state.images[image_id] = Image(image_id, (*base, layer))
            self._state.built.append(self._state.images[image_id])
        return dict(
            image_id=image_id,
            result=api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS),
            metadata=api_pb2.ImageMetadata(image_builder_version=BUILDER_VERSION),
        )
