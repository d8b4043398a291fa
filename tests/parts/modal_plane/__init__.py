"""A Modal on loopback, against which the launcher's tests run the unmodified `modal` command line.

    with ControlPlane(tmp_path, secrets={"wandb-secret": {"WANDB_API_KEY": "…"}}) as plane:
        done = plane.modal("run", "modal_train.py", "--action", "preflight", cwd=checkout)
        assert done.code == 0, done.stderr
        assert plane.functions["stage"].gpu == ("H100", 8)

`ControlPlane` is a server in this process with the protocol of the `modal` package (`modal_proto`). Client
and container are real: each attempt of a call is a process of Modal's own entrypoint, in a folder with the
app's mounted files, with the image's environment and the secrets' values.

As Modal documents it:

- A container sees other commits on a volume only after a reload, which is refused while it has files of the
  volume open. A commit reloads too. A container commits when it ends in order, not when it is killed
  (`volumes.py`).
- The next call of a function reuses an idle container (`containers.py`).
- The client's own `.remote()` ends with the client. A spawned call of a detached app continues (`apps.py`).
- A failed or timed-out call is retried. A dead container is replaced once, a preempted one every time, with
  the same input (`calls.py`).
- Cores, memory, retries, time-outs, regions and names beyond Modal's limits are refused (`functions.py`).
- The client has only modal, PyYAML and python-dotenv (`client.py`).

Missing are builds of images, `Image.run_function`, classes, generators, schedules, sandboxes, GPUs,
background commits, removal of files, volumes of the second version, and limits on containers. At a web
function's address nobody answers. Results never expire. Requests without a handler are refused by name.

A mount such as `/corpus` cannot exist here, so `DRZERO_MOUNT_CORPUS` has its folder. `/root` and other added
files are below `DRZERO_CONTAINER_ROOT`. Such paths in the app's environment, as in `HF_HOME=/cache/hub`, are
replaced.

`servicer.py` passes requests to the handlers, `state.py` has everything the server received, `connections/`
records where processes connect to.
"""

from modal_plane.plane import ControlPlane

__all__ = ["ControlPlane"]
