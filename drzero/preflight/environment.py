"""Checks of a run's surroundings: ports, secrets, imports, the run folder, files on other machines."""

import ast
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hydra.utils import get_object

from drzero.ops.bearer import AGENT_KEY, MODEL_KEY, bearer_of
from drzero.ops.process.ports import PortTaken, free_port
from drzero.ops.text import LOOPBACK
from drzero.ops.watchdog.stacks import why_unreadable
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.preflight.memory_ledger import trained, width
from search.wire import TOKEN_VARIABLE


def check_ports(ctx: CheckContext) -> Iterator[Finding]:
    """Configured ports must be free and differ."""
    config = ctx.config
    used = {"retrieval": ctx.serves_search, "solver": ctx.serves_model}
    services = [name for name, is_used in used.items() if is_used]
    ports = {name: config[name].port for name in services if config[name].port is not None}
    if len(ports) == 2 and ports["retrieval"] == ports["solver"]:
        why = f"retrieval.port and solver.port are both {ports['solver']}"
        yield error("solver.port", why, "choose two ports, or none")
    for name in services:
        host = config[name].host
        if host not in LOOPBACK and name == "retrieval":
            if bearer_of(TOKEN_VARIABLE) is None:
                why = f"the retrieval service would listen at {host}, where other machines may reach it"
                yield error("retrieval.host", why, f"set {TOKEN_VARIABLE}, or use 127.0.0.1")
        elif host not in LOOPBACK:
            yield warning(
                f"{name}.host",
                f"the {name} service will listen at {host}, where other machines may reach it without a "
                "password",
                "use 127.0.0.1 unless you want that",
            )
        if not ctx.machine.is_here:
            continue
        try:
            free_port(ports.get(name), host)
        except PortTaken as taken:
            yield error(f"{name}.port", str(taken).rstrip("."), "")
        except OSError as reason:  # not an address of this machine
            why = f"nothing can listen at {host} ({reason.strerror})"
            yield error(f"{name}.host", why, "use 127.0.0.1")


def check_agent_host(ctx: CheckContext) -> Iterator[Finding]:
    """Beyond this machine the agent answers only for a token."""
    host = ctx.config.host
    if host not in LOOPBACK and bearer_of(AGENT_KEY) is None:
        why = f"the agent would answer at {host}, where other machines may reach it"
        yield error("host", why, f"set {AGENT_KEY} here or in .env, or use 127.0.0.1")


def check_secrets(ctx: CheckContext) -> Iterator[Finding]:
    """Secrets must be set, and not to a placeholder. Raises TokenUnusable for a token that cannot be sent."""
    if ctx.trains and "wandb" in ctx.config.trainer.logger and not os.environ.get("WANDB_API_KEY"):
        why = "Weights & Biases logs offline, into the run's folder"
        yield note("WANDB_API_KEY", why, "put the key into .env to see runs live", value="not set")
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        value = os.environ.get(name, "")
        if value.lower().startswith(("your-", "your_", "<", "xxx", "changeme")):
            why = f"{name} is still the placeholder of an example file"
            fix = "put the key into .env, or leave the line out"
            yield error(name, why, fix, value="set, but not to a key")
    if ctx.searches:
        bearer_of(TOKEN_VARIABLE)
    if ctx.serves_model:
        bearer_of(MODEL_KEY)


def check_stacks(ctx: CheckContext) -> Iterator[Finding]:
    """py-spy must be allowed to read processes, or a stall has no stacks."""
    if ctx.starting and (problem := why_unreadable()):
        why = "stacks of the run's processes cannot be read, so a stall would be reported without its cause"
        fix = "run as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0"
        yield warning("watchdog", why, fix, value=problem)


def check_files_visible(ctx: CheckContext) -> Iterator[Finding]:
    """Files on another machine's volume cannot be checked here."""
    for root in ("corpus", "checkpoints"):
        if not ctx.sees(root):
            folder = ctx.config.paths[root]
            why = f"{folder} is not on this machine, so its files have not been checked"
            fix = "run preflight where the volume is mounted, before any GPU is requested"
            yield warning(f"paths.{root}", why, fix)


_SOCKET_BYTES = 107  # longest path of a Unix socket
_LONGEST_PID = "4194304"
_OURS = ("verl_ext.", "search.", "data.", "drzero.ops.")


def check_imports(ctx: CheckContext) -> Iterator[Finding]:
    """Reward function, search tool, agent loops and a custom dataset class must import.

    Only a start imports our own, because veRL takes longer to import than all other checks.
    """
    config, targets = ctx.config, {}
    reward, dataset = config.reward.custom_reward_function, config.data.get("custom_cls")
    if reward.path:
        targets["reward.custom_reward_function"] = f"{reward.path}:{reward.name}"
    elif not ctx.plays:  # an environment scores its own episodes
        key = "reward.custom_reward_function.path"
        yield error(key, "no reward function is named", "leave it as it is in the recipe")
    for place, tool in enumerate(() if ctx.plays else config.search_tool.tools):
        targets[f"search_tool.tools.{place}.class_name"] = tool.class_name
    loops = [loop.name for loop in config.agent_loops.loops]
    targets |= {f"agent_loops.loops ({loop.name})": loop["_target_"] for loop in config.agent_loops.loops}
    if dataset is not None and dataset.path:
        targets["data.custom_cls"] = f"{dataset.path}:{dataset.name}"
    for key, target in targets.items():
        try:
            _load(target, ctx.starting)
        except Exception as reason:  # importing a user's module can fail in any way
            message = " ".join(str(reason).split()) or type(reason).__name__
            why = f"{target} does not import ({type(reason).__name__}: {message[:300]})"
            yield error(key, why, "correct the path or the name, or repair what it imports", value=target)
    chosen = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if chosen not in (*loops, "single_turn_agent", "tool_agent"):
        why = f"there is no agent loop {chosen!r}"
        fix = f"choose one of {', '.join(loops)}"
        yield error("actor_rollout_ref.rollout.agent.default_agent_loop", why, fix)


@cache
def _load(target: str, starting: bool) -> None:
    """Import `package.module.name`, `pkg://package.module:name` or `file:name`. Raises the import's error."""
    path, _, name = target.rpartition(":" if ":" in target else ".")
    module = path.removeprefix("pkg://")
    if not starting and module.startswith(_OURS):
        if name not in _names_of(module):
            raise ImportError(f"cannot import name {name!r} from {module!r}")
    elif ":" in target:
        from verl.utils.import_utils import load_extern_object

        load_extern_object(path, name)
    else:
        get_object(target)


def _names_of(module: str) -> set[str]:
    """The top-level names of a module, by its source. Raises ImportError if it imports a missing package."""
    spec, names = find_spec(module), set[str]()
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
            parent = node.module if isinstance(node, ast.ImportFrom) else None
            for imported in [parent] if parent else [alias.name for alias in node.names]:
                if find_spec(imported.partition(".")[0]) is None:
                    raise ModuleNotFoundError(f"No module named {imported!r}, which {module} imports")
    return names


def writable_place(folder: Path) -> Path:
    """A folder, or its nearest existing parent, after a trial write. Raises OSError."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as reason:
        raise OSError(reason.errno, reason.strerror, str(place)) from reason
    return place


def check_written_folders(ctx: CheckContext) -> Iterator[Finding]:
    """Folders that nobody named must be writable too, and a socket's path in Ray's must be short enough."""
    if not ctx.machine.is_here:
        return
    said = os.environ.get
    temporary = next((name for name in ("RAY_TMPDIR", "TMPDIR") if said(name)), "TMPDIR")
    hub = Path(said("HF_HOME") or Path(said("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    of_data = "the package datasets, which reads the training files,"
    written = [
        (temporary, "Ray, and every service,", Path("/tmp"), error),
        ("HF_DATASETS_CACHE", of_data, hub / "datasets", error if ctx.trains else warning),
        ("HF_HUB_CACHE", "the model hub's client", hub / "hub", warning),
    ]
    if ctx.trains and ctx.config.machine.gpus:
        of_kernels = "Triton, which compiles for a GPU,"
        written.append(("TRITON_CACHE_DIR", of_kernels, Path("~/.triton/cache"), warning))
    for variable, writer, usual, severity in written:
        folder = Path(said(variable) or usual)
        try:
            writable_place(folder.expanduser())
        except (OSError, RuntimeError) as reason:  # RuntimeError: nobody has this home
            cause = reason.strerror if isinstance(reason, OSError) else reason
            why = f"{writer} cannot write there ({cause})"
            yield severity(variable, why, f"set {variable} to a folder that can be written", value=folder)
    folder = Path(said(temporary) or "/tmp")
    socket = f"{folder}/ray/session_2026-01-01_00-00-00_000000_{_LONGEST_PID}/sockets/plasma_store"
    if ctx.trains and (left := _SOCKET_BYTES - len(os.fsencode(socket))) < 0:
        why = f"the path is too long for Ray's sockets by {-left} bytes"
        fix = "set RAY_TMPDIR to a shorter folder, such as /tmp"
        yield error(temporary, why, fix, value=folder)


def check_own_address(ctx: CheckContext) -> Iterator[Finding]:
    """`serve-model` listens at its own `host` and `port`, so the solver's must be the same."""
    config = ctx.config
    for name in ("host", "port"):
        if config.solver[name] != config[name]:
            yield error(f"solver.{name}", f"the server is at {name}={config[name]}", f"set {name}= instead")


def check_run_folder(ctx: CheckContext) -> Iterator[Finding]:
    """The run's folder, or its nearest existing parent, must be writable with `run.min_free_gb` free."""
    config = ctx.config
    folder = Path(config.run.dir)
    try:
        place = writable_place(folder)
        free_gb = shutil.disk_usage(place).free / 1e9
    except OSError as reason:
        why = f"{folder} cannot be written ({reason.strerror} at {reason.filename})"
        yield error("run.dir", why, "choose another place (paths.checkpoints=…), or make this one writable")
        return
    if free_gb < config.run.min_free_gb:
        # The disk of another machine may be larger.
        severity = error if ctx.machine.is_here else warning
        yield severity(
            "run.min_free_gb",
            f"the disk of {folder} has {free_gb:.1f} GB free, and run.min_free_gb="
            f"{config.run.min_free_gb:g} are required",
            "make room, choose another place (paths.checkpoints=…), or lower run.min_free_gb",
        )
    elif ctx.trains and ctx.config.trainer.save_freq > 0 and ctx.machine.is_here:
        yield from _room_for_checkpoints(ctx, free_gb)


def _room_for_checkpoints(ctx: CheckContext, free_gb: float) -> Iterator[Finding]:
    """The disk must hold one checkpoint more than is kept: 4 bytes a weight, 8 more if trained."""
    config = ctx.config
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    kept = config.trainer.max_actor_ckpt_to_keep
    if shape is None:
        return
    checkpoint_gb = (4 * shape.parameters + 8 * trained(config, shape)) / 1e9
    if kept is None:
        why = f"every checkpoint is kept, {checkpoint_gb:.0f} GB each"
        fix = "set how many to keep, unless there is room for all"
        yield note("trainer.max_actor_ckpt_to_keep", why, fix)
        return
    export_gb = width(config.run.export_dtype) * shape.parameters / 1e9
    wanted = (kept + 1) * checkpoint_gb + export_gb
    if free_gb < wanted:
        why = f"the disk has {free_gb:.0f} GB free; {kept + 1} checkpoints and an export take {wanted:.0f} GB"
        yield warning("run.dir", why, "make room, or keep fewer (trainer.max_actor_ckpt_to_keep)")
