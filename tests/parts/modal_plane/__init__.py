"""A Modal on loopback, against which the launcher's tests run the unmodified `modal` command line.

    with ControlPlane(tmp_path) as plane:
        plane.modal("run", "modal_train.py", "--action", "preflight", cwd=checkout).succeeded()

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
- The client has only modal, PyYAML and python-dotenv (`client.py`).

Missing is what the launcher does not use: builds of images, classes, generators, schedules, GPUs, background
commits, read-only volumes, Modal's limits. At the address of a web function or a tunnel nobody answers.
Requests without a handler are refused.

A mount such as `/corpus` cannot exist here, so `DRZERO_MOUNT_CORPUS` has its folder. Such paths in the app's
environment, as in `HF_HOME=/cache/hub`, are replaced.
"""

from modal_plane.plane import ControlPlane

__all__ = ["ControlPlane"]
