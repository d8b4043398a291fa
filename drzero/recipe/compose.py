"""One composed config per stage: what is checked, what the child process gets, what is kept with the run.

    config = compose_stage("challenger", ["hardware=cpu", "trainer.total_training_steps=2", "+trainer.foo=1"])

Hydra composes once, in this process; the trainer reads the resolved file (`--config-name resolved`) and never
composes again, so that what was checked is what runs.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from data.hop_ratio import prompts_file
from drzero.ops.files import atomic_write
from drzero.ops.notices import plain
from drzero.ops.resources.gpu import gpus_here
from drzero.ops.text import is_loopback
from drzero.ops.versions import installed_versions
from drzero.recipe.overrides import OverrideError, check_overrides, for_stage, key_of, leaf_values
from drzero.recipe.settings.retrieval import OF_OWN_SERVICE
from drzero.recipe.settings.schema import schema_of
from environments.registry import canonical

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"
WITH_ENVIRONMENT = ("train", "evaluate", "agent_bench")
"""The stages that run in any environment."""
RESOLVED = "resolved"
"""Name of the resolved config in a run's folder."""
CPUS_A_GPU = 3
"""Ray's CPUs that veRL 0.9.1 reserves with each GPU that trains, on the GPU's own node."""


def fast_cpu_dtype(engine: str) -> str:
    """bfloat16 where the processor multiplies it (about 1.7 times as fast there), else float32.

    Always float32 for SGLang, whose attention of one new token takes seven times as long in bfloat16. Read
    from the kernel's list: torch would take a second and a half to import for it.
    """
    if engine == "sglang":
        return "float32"
    flags = re.findall(r"^(?:flags|Features)\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(" ".join(flags[:1]).split())
    # What oneDNN asks for: AVX-512 with these three on x86, bf16 on Arm.
    return "bfloat16" if {"avx512bw", "avx512vl", "avx512dq"} <= has or "bf16" in has else "float32"


def solver_export(checkpoints: str, iteration: int, base_model: str) -> str:
    """The solver's weights after an iteration: its merged export, the base model after none."""
    return f"{checkpoints}/solver_iter{iteration}_hf" if iteration > 0 else base_model


def challenger_run(checkpoints: str, iteration: int) -> str | None:
    """The run folder of an iteration's challenger; None for iteration 0."""
    return f"{checkpoints}/challenger_iter{iteration}" if iteration > 0 else None


def verl_config() -> str:
    """Where veRL's own config files are. Named as a package, Hydra would import it: two seconds a command."""
    found = find_spec("verl")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("veRL, whose config files are needed, is not installed: run make setup")
    return f"file://{Path(found.origin).parent / 'trainer' / 'config'}"


def joins_cluster(config: DictConfig) -> bool:
    """Whether a training connects to a Ray that runs already, instead of starting one of its own."""
    return config.machine.ray_address is not None or config.machine.nodes > 1


def cpus_reserved(config: DictConfig) -> int:
    """The CPUs that Ray must count on all nodes, or veRL 0.9.1 waits for ever for its placement group.

    They are logical: Ray binds no process to any. Reserved are CPUS_A_GPU for each GPU that trains
    (ResourcePoolManager), 2 for each that only samples (RolloutReplica), 1 for the transfer queue's
    controller and for each of its storage units; 4 are left, because every other actor and task needs one to
    be placed.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    training = CPUS_A_GPU * trainer.n_gpus_per_node * trainer.nnodes
    return training + 2 * rollout.nnodes * rollout.n_gpus_per_node + 1 + units + 4


def own_ray(value: Any, *, _root_: DictConfig) -> Any:
    """`value` for a Ray of the run's own; null for one that it joins, which takes no sizes from who joins."""
    return None if joins_cluster(_root_) else value


def ray_beyond_loopback(*, _root_: DictConfig) -> int:
    """1 where Ray's own servers must be reached from other machines, else 0: they listen on 127.0.0.1."""
    address = _root_.machine.ray_address
    return int(address is not None and not is_loopback(address))


def reward_workers(questions: Any, attempts: int) -> int:
    """The processes that render and parse a step's solver attempts: one for 160 of them.

    An attempt of four turns takes one about 20 ms, so a single one would spend half a minute of its core on
    the 256 × 5 attempts of the published step, and every answer would wait for it.
    """
    # A batch that is no number is an error of its own key's.
    return -(-questions * attempts // 160) if isinstance(questions, int) else 1


def copies(gpus: int, each: int) -> int:
    """How many engines of `each` GPUs a machine holds; at least one, which preflight then refuses."""
    return max(1, gpus // max(1, each))


def rollout_dtype(device: str) -> str:
    """The numbers that rollouts are sampled with, as hardware/ sets them: the actor's."""
    return "float32" if device == "cpu" else "bfloat16"


def plain_name(name: str | None) -> str:
    """An environment's name as part of a run's name: `verifiers:gsm8k` is `verifiers-gsm8k`."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name or "nothing")


def evaluation_name(environment: str | None, iteration: int) -> str:
    """The name of an evaluation: of a loop's solver by iteration, or in an environment."""
    return f"evaluate_{plain_name(environment)}" if environment else f"evaluate_iter{iteration}"


def evaluated_model(environment: str | None, checkpoints: str, iteration: int, base_model: str) -> str:
    """The model of an evaluation: a loop's solver after an iteration; in an environment the base model."""
    return base_model if environment else solver_export(checkpoints, iteration, base_model)


def retrieval_url(retrieval: DictConfig) -> str:
    """Where a run's searches go, from the settings `retrieval`: the service at `url`, else the run's own."""
    return str(retrieval.url or f"http://{retrieval.host}:{retrieval.port}").rstrip("/")


# For the config files: arithmetic, what this machine has, and where iterations leave things.
OmegaConf.register_new_resolver("add", lambda *numbers: sum(numbers), replace=True)
OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
OmegaConf.register_new_resolver("copies", copies, replace=True)
OmegaConf.register_new_resolver("prompts_file", prompts_file, replace=True)
OmegaConf.register_new_resolver("solver_export", solver_export, replace=True)
OmegaConf.register_new_resolver("challenger_run", challenger_run, replace=True)
OmegaConf.register_new_resolver("evaluation_name", evaluation_name, replace=True)
OmegaConf.register_new_resolver("evaluated_model", evaluated_model, replace=True)
OmegaConf.register_new_resolver("rollout_dtype", rollout_dtype, replace=True)
OmegaConf.register_new_resolver("plain_name", plain_name, replace=True)
OmegaConf.register_new_resolver("verl_config", verl_config, replace=True)
OmegaConf.register_new_resolver("fast_cpu_dtype", fast_cpu_dtype, replace=True)
OmegaConf.register_new_resolver("share", lambda whole, parts: -(-whole // max(parts, 1)), replace=True)
OmegaConf.register_new_resolver("retrieval_url", retrieval_url, replace=True)
OmegaConf.register_new_resolver("reward_workers", reward_workers, replace=True)
OmegaConf.register_new_resolver("ray_cpus", lambda *, _root_: cpus_reserved(_root_), replace=True)
OmegaConf.register_new_resolver(
    "ray_address", lambda *, _root_: _root_.machine.ray_address or "local", replace=True
)
OmegaConf.register_new_resolver("own_ray", own_ray, replace=True)
OmegaConf.register_new_resolver("ray_beyond_loopback", ray_beyond_loopback, replace=True)
OmegaConf.register_new_resolver("cores", lambda: len(os.sched_getaffinity(0)), replace=True)


def detect_hardware() -> str:
    """The hardware profile of this machine: 8xh100 from 8 GPUs on, single_gpu from 1 on, else cpu."""
    gpus = gpus_here()
    return "8xh100" if gpus >= 8 else "single_gpu" if gpus else "cpu"


def fitting_hardware(overrides: Sequence[str]) -> str:
    """The hardware profile that a declared machine is made for (`compute=…`), else this machine's."""
    declared = [override.partition("=")[2] for override in overrides if override.startswith("compute=")]
    path = CONFIG_DIR / "compute" / f"{declared[-1] if declared else 'local'}.yaml"
    # An unknown option is refused, with the nearest one, when the overrides are checked.
    hardware = OmegaConf.load(path).compute.get("hardware") if path.is_file() else None
    return hardware or detect_hardware()


def compose_stage(stage: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `config/{stage}.yaml` with overrides in Hydra's grammar; paths come out absolute.

    `hardware=` is picked by `compute=`, or by what the machine has, unless an override sets it. Raises
    OverrideError for an override that cannot work, and for a value of ours that is not allowed.
    """
    overrides = with_environment(stage, overrides)
    if not any(override.startswith("hardware=") for override in overrides):
        overrides.insert(0, f"hardware={fitting_hardware(overrides)}")
    schema = schema_of(stage)
    if ignored := [override for override in overrides if schema.ignores(key_of(override))]:
        # A stage without veRL takes no part in these; a stage with it says whether they exist.
        groups = [o for o in overrides if o.startswith(("hardware=", "model=", "compute=", "env="))]
        check_overrides([*groups, *ignored], CONFIG_DIR, "challenger", schema_of("challenger"))
    config = check_overrides(overrides, CONFIG_DIR, stage, schema)
    _refuse_own_service(config, stage, overrides)
    with open_dict(config):
        for name, path in config.paths.items():
            config.paths[name] = os.path.abspath(path)
        config.run.dir = os.path.abspath(config.run.dir)
        if "actor_rollout_ref" in config:
            rollout = config.actor_rollout_ref.rollout
            # veRL has them by engine; they win over those that the recipe sets.
            rollout.engine_kwargs = OmegaConf.merge(
                rollout.engine_kwargs, {rollout.name: config.rollout.server_args}
            )
    return config


def _refuse_own_service(config: DictConfig, stage: str, overrides: Sequence[str]) -> None:
    """Refuse what can only be meant for a retrieval service of the run's own next to `retrieval.url`."""
    if (url := OmegaConf.select(config, "retrieval.url")) is None:
        return
    if stage == "serve_search":
        raise OverrideError(
            f"retrieval.url={url}: serve-search starts a service, and this one runs already: leave it out"
        ).of("retrieval.url=")
    if stage == "preview" and config.source is not None:
        raise OverrideError(
            f"retrieval.url={url}: a preview with source= searches the index that it makes of a sample: "
            "leave one of the two out"
        ).of("retrieval.url=")
    for override in overrides:
        if (key := key_of(override)) in OF_OWN_SERVICE:
            raise OverrideError(
                f"{override!r}: with retrieval.url={url} no service is started here that would read {key}: "
                "leave one of the two out"
            ).of(override)


def with_environment(stage: str, overrides: Sequence[str]) -> list[str]:
    """`env=NAME` of an environment as the group `environment` and its name; other overrides stay.

    The options of the group `env` are corpora to search; every other name is an environment's, which may be
    the user's own and so has no file.
    """
    if stage not in WITH_ENVIRONMENT:
        return list(overrides)
    written: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        name = canonical(value.strip("'\""))
        is_corpus = stage == "evaluate" and (CONFIG_DIR / "env" / f"{name}.yaml").is_file()
        if key != "env" or is_corpus:
            written.append(override)
            continue
        has_file = (CONFIG_DIR / "environment" / f"{name}.yaml").is_file()
        written += [f"environment={name if has_file else 'named'}", f"environment.name='{name}'"]
    return written


def compose_plain(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `config/{name}.yaml` as Hydra does; no value is checked or filled in."""
    schema = schema_of(name)
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose(name, overrides=for_stage(overrides, schema))
    with open_dict(config):
        schema.prune(config)
    return config


def resolve(config: DictConfig) -> DictConfig:
    """The same config without interpolations; raises OmegaConf's error for a key that has no value."""
    return DictConfig(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))


def first_broken(config: DictConfig) -> tuple[tuple[str, str], OmegaConfBaseException] | None:
    """An interpolation that fails although whatever it names resolves: its key and text, and why it fails."""
    failing: dict[str, tuple[str, OmegaConfBaseException]] = {}
    for key, text in leaf_values("", OmegaConf.to_container(config, resolve=False)):
        if isinstance(text, str) and "${" in text:
            try:
                OmegaConf.select(config, key)
            except OmegaConfBaseException as refused:
                failing[key] = (text, refused)
    for key, (text, reason) in failing.items():
        if not failing.keys() & set(re.findall(r"[\w.]+", text)):
            return (key, text), reason
    return None


def write_resolved(config: DictConfig) -> Path:
    """Write the config into the run's folder, below the command and the versions that it ran with.

    For a trainer also `search_tool` and `agent_loops`, because veRL takes tools and agent loops from paths.
    Returns its path.
    """
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if "agent_loops" in config:  # only the stages with a trainer compose veRL's part
        atomic_write(folder / "search_tool_config.yaml", OmegaConf.to_yaml(config.search_tool))
        atomic_write(folder / "agent_loops.yaml", OmegaConf.to_yaml(config.agent_loops.loops))
    return write_as_run(config, folder)


def write_as_run(config: DictConfig, folder: Path) -> Path:
    """Write a config into a folder, below the command and the versions of the run; returns its path."""
    path = folder / f"{RESOLVED}.yaml"
    # As comments: the file is read as a config, in which several characters would end a line.
    command = plain(shlex.join(sys.argv)).replace("\n", "\\n")
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    head = f"# command: {command}\n# versions: {versions}\n"
    atomic_write(path, head + OmegaConf.to_yaml(config))
    return path


def process_env(config: DictConfig) -> dict[str, str]:
    """The environment that the hardware profile and the log level ask for."""
    level = str(config.log_level).upper()
    levels = {"DRZERO_LOG_LEVEL": level, "VERL_LOGGING_LEVEL": level, "TQ_LOGGING_LEVEL": level}
    # Only at DEBUG: with the variable set, Ray prints a line about it in every process.
    ray = {"RAY_BACKEND_LOG_LEVEL": "debug"} if level == "DEBUG" else {}
    return levels | ray | {name: str(value) for name, value in config.process_env.items()}


def verl_env(config: DictConfig) -> dict[str, str]:
    """`process_env` and what every process that imports veRL needs."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin",
        # veRL warns in every process of engines that are not installed.
        "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",
        **process_env(config),
    }
