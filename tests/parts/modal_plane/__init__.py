"""A Modal of our own on loopback: what the launcher's tests run the unmodified `modal` command line against.

`ControlPlane` is a server in this process that speaks the protocol which the `modal` package publishes
(`modal_proto`), on 127.0.0.1. The client is the real one, started as a process, and so is the container: each
attempt of a call is a process of Modal's own container entrypoint (`python -m modal._container_entrypoint`),
in a folder with the files that the app mounted and nothing else of the caller's, with the image's
environment and the secrets' values. So nested `.remote()`, `.spawn()`, `with_options`, `Volume.commit()`,
`modal.is_local()` and the ids of the current call are Modal's own code on both ends.

    with ControlPlane(tmp_path, secrets={"wandb-secret": {"WANDB_API_KEY": "…"}}) as plane:
        done = plane.modal("run", "modal_train.py", "--action", "preflight", cwd=checkout)
        assert done.code == 0, done.stderr
        assert plane.functions["stage"].gpu == ("H100", 8)

What it does as Modal does, with Modal's documentation for it:

- Each container has its own view of a volume: it sees what others have committed only after a reload, which
  is refused while it has files of the volume open; a commit reloads as well. A container commits what it has
  mounted when it ends in order, and not when it is killed (`volumes.py`).
- An idle container is reused by the next call of its function (`containers.py`).
- The client's own `.remote()` ends with the client; a spawned call of a detached app continues, and so
  does what a container calls. An app that is not detached ends with its client (`apps.py`).
- A failed or timed-out call is retried up to the function's `retries`. A container that dies is replaced
  and gets the same input, once; so does a preempted one, any number of times (`calls.py`).
- Cores, memory, retries, time-outs, regions and names beyond Modal's limits are refused (`functions.py`).
- The client has modal, PyYAML and python-dotenv, and no other package (`client.py`).

What it does not do: build images, run `Image.run_function`, classes, generators, schedules, sandboxes, GPUs,
commits in the background, or limits on the number of containers. A web function is declared, and gets an
address at which nobody answers; `modal deploy` declares an app, whose functions then wait for calls. Results
expire when a test says so (`plane.expire`). A request without a handler is refused with its name.

A mount path such as `/corpus` cannot exist here, so a container gets its folder in the environment
variable `DRZERO_MOUNT_CORPUS`; `/root` and everything else that was added to the image are under
`DRZERO_CONTAINER_ROOT`. Where an environment variable of the app has a path under `/root` or a mount path, as
`HF_HOME=/cache/hub`, it is replaced by the path here.

Files: `plane.py` is what tests use; `servicer.py` gives requests to the handlers, which are in `apps.py`,
`objects.py` (images, mounts, secrets), `functions.py`, `calls.py`, `containers.py`, `volumes.py`, `dicts.py`
and `blobs.py`; `state.py` is what the server has received; `client.py` runs the command line; `connections/`
records where processes connect to. Tests of it: `pytest tests/launch/test_modal_plane.py`.
"""

from modal_plane.plane import ControlPlane

__all__ = ["ControlPlane"]
