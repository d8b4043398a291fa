"""One composed config per stage: what is checked, what the child process gets, what is kept with the run.

    config = compose_stage("challenger", ["hardware=cpu", "trainer.total_training_steps=2", "+trainer.foo=1"])

Hydra composes once, in this process; the trainer reads the resolved file (`--config-name resolved`) and never
composes again, so that what was checked is what runs.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ops.files import atomic_write
from ops.resources.gpu import gpus_here
from pipeline.overrides import check_overrides, for_stage, key_of, leaf_values
from pipeline.settings.schema import schema_of

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
RESOLVED = "resolved"
"""Name of the resolved config in a run's folder."""


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


def ray_cpus(*, _root_: DictConfig) -> int | None:
    """The CPUs that Ray must count, or veRL 0.9.1 waits for ever, without a word, for its placement group.

    They are logical: Ray binds no process to any. Reserved are 3 for each GPU that trains
    (ResourcePoolManager), 2 for each that only samples (RolloutReplica), 1 for the transfer queue's
    controller and for each of its storage units; 4 are left, because every other actor and task needs one to
    be placed. None for several machines: they are a Ray cluster of the user's, which counts its own.
    """
    trainer, rollout = _root_.trainer, _root_.actor_rollout_ref.rollout
    if trainer.nnodes > 1:
        return None
    units = _root_.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return 3 * trainer.n_gpus_per_node + 2 * rollout.nnodes * rollout.n_gpus_per_node + 1 + units + 4


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


# For the config files: arithmetic, what this machine has, and where iterations leave things.
OmegaConf.register_new_resolver("add", lambda *numbers: sum(numbers), replace=True)
OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
OmegaConf.register_new_resolver("copies", copies, replace=True)
OmegaConf.register_new_resolver("solver_export", solver_export, replace=True)
OmegaConf.register_new_resolver("challenger_run", challenger_run, replace=True)
OmegaConf.register_new_resolver("verl_config", verl_config, replace=True)
OmegaConf.register_new_resolver("fast_cpu_dtype", fast_cpu_dtype, replace=True)
OmegaConf.register_new_resolver("share", lambda whole, parts: -(-whole // max(parts, 1)), replace=True)
OmegaConf.register_new_resolver("reward_workers", reward_workers, replace=True)
OmegaConf.register_new_resolver("ray_cpus", ray_cpus, replace=True)
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
    overrides = list(overrides)
    if not any(override.startswith("hardware=") for override in overrides):
        overrides.insert(0, f"hardware={fitting_hardware(overrides)}")
    schema = schema_of(stage)
    if ignored := [override for override in overrides if schema.ignores(key_of(override))]:
        # A stage without veRL takes no part in these; a stage with it says whether they exist.
        groups = [o for o in overrides if o.startswith(("hardware=", "model=", "compute=", "env="))]
        check_overrides([*groups, *ignored], CONFIG_DIR, "challenger", schema_of("challenger"))
    config = check_overrides(overrides, CONFIG_DIR, stage, schema)
    with open_dict(config):
        for name, path in config.paths.items():
            config.paths[name] = os.path.abspath(path)
        config.run.dir = os.path.abspath(config.run.dir)
    return config


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
    """Write the config into the run's folder; returns its path.

    For a trainer also `search_tool` and `agent_loops`, because veRL takes tools and agent loops from paths.
    """
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if "agent_loops" in config:  # only the stages with a trainer compose veRL's part
        atomic_write(folder / "search_tool_config.yaml", OmegaConf.to_yaml(config.search_tool))
        atomic_write(folder / "agent_loops.yaml", OmegaConf.to_yaml(config.agent_loops.loops))
    path = folder / f"{RESOLVED}.yaml"
    atomic_write(path, OmegaConf.to_yaml(config))
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
