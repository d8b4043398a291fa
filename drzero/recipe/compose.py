"""One composed config per stage, which preflight checks, the child process runs, and the run's folder keeps.

    config = compose_stage("challenger", ["hardware=cpu", "trainer.total_training_steps=2", "+trainer.foo=1"])

Hydra composes only here. The trainer reads the resolved file.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
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
from drzero.recipe.gpu_split import SERVE_GPUS, VISIBLE, count, fault, training_gpus, visible_devices
from drzero.recipe.overrides import OverrideError, assigned, check_overrides, for_stage, key_of, leaf_values
from drzero.recipe.settings.retrieval import SHARED
from drzero.recipe.settings.schema import in_full, schema_of
from environments.registry import canonical, shown

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"
WITH_ENVIRONMENT = ("train", "evaluate", "agent_bench")
RESOLVED = "resolved"
CPUS_A_GPU = 3  # Ray CPUs that veRL 0.9.1 reserves with each training GPU, on the GPU's node
ATTEMPTS_A_REWARD_WORKER = 160
"""A worker takes about 20 ms to render and parse an attempt of four turns, and a step waits for all."""


def options(group: str) -> list[str]:
    """The names of a group of `config/`."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def fast_cpu_dtype(engine: str) -> str:
    """bfloat16 if the processor multiplies it natively (1.7 times as fast), else float32. SGLang: float32.

    SGLang's attention takes seven times as long in bfloat16. Importing torch to ask would take 1.5 s.
    """
    if engine == "sglang":
        return "float32"
    flags = re.findall(r"^(?:flags|Features)\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(" ".join(flags[:1]).split())
    # oneDNN wants AVX-512 with these three on x86, bf16 on Arm.
    return "bfloat16" if {"avx512bw", "avx512vl", "avx512dq"} <= has or "bf16" in has else "float32"


def solver_after(checkpoints: str, iteration: int, base_model: str) -> str:
    """The solver's export after an iteration, or the base model before the first."""
    return f"{checkpoints}/solver_iter{iteration}_hf" if iteration > 0 else base_model


def evaluated_model(environment: str | None, checkpoints: str, iteration: int, base_model: str) -> str:
    """The model to evaluate: the loop's solver after an iteration, or the base model in an environment."""
    return base_model if environment else solver_after(checkpoints, iteration, base_model)


def run_name(stage: str, environment: str | None, iteration: int | None = None) -> str:
    """A run's name, by environment (`verifiers:gsm8k` becomes `verifiers-gsm8k`) or else by iteration."""
    if environment is None and iteration is not None:
        return f"{stage}_iter{iteration}"
    return f"{stage}_{re.sub(r'[^A-Za-z0-9_.-]', '-', shown(environment or 'nothing'))}"


def verl_config() -> str:
    """veRL's config folder. Hydra would import veRL to find it by package, two seconds a command."""
    found = find_spec("verl")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("veRL, whose config files are needed, is not installed: run make setup")
    return f"file://{Path(found.origin).parent / 'trainer' / 'config'}"


def retrieval_url(retrieval: DictConfig) -> str:
    """The retrieval service of a run: the one at `retrieval.url`, or its own."""
    return str(retrieval.url or f"http://{retrieval.host}:{retrieval.port}").rstrip("/")


def _reward_workers(questions: object, attempts: int) -> int:
    # A batch that is no number is refused for its own key.
    return -(-questions * attempts // ATTEMPTS_A_REWARD_WORKER) if isinstance(questions, int) else 1


def joins_cluster(config: DictConfig) -> bool:
    """Whether a training joins a running Ray cluster instead of starting a local Ray."""
    return _joins(config.machine.nodes, config.machine.ray_address)


def _joins(nodes: int, ray_address: str | None) -> bool:
    return ray_address is not None or nodes > 1


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(numbers),
    "mul": lambda a, b: a * b,
    "share": lambda whole, parts: -(-whole // max(parts, 1)),
    # Engines of `each` GPUs on a machine. At least one, which preflight then refuses.
    "copies": lambda gpus, each: max(1, gpus // max(1, each)),
    "training_gpus": training_gpus,
    "serving_gpus": lambda serve_gpus, training: count(serve_gpus) or training,
    "serving_nodes": lambda nodes, serve_gpus: nodes if count(serve_gpus) else 0,
    "cores": lambda: len(os.sched_getaffinity(0)),
    "fast_cpu_dtype": fast_cpu_dtype,
    # FSDP2 shards the fused form of these alone.
    "has_fused": lambda optimizer: optimizer in ("Adam", "AdamW"),
    # Precision of rollouts, as hardware/ sets it.
    "rollout_dtype": lambda device: "float32" if device == "cpu" else "bfloat16",
    "prompts_file": prompts_file,
    "previous_solver": lambda checkpoints, iteration, base: solver_after(checkpoints, iteration - 1, base),
    "previous_challenger": lambda checkpoints, iteration: (
        f"{checkpoints}/challenger_iter{iteration - 1}" if iteration > 1 else None
    ),
    "evaluated_model": evaluated_model,
    "run_name": run_name,
    "retrieval_url": retrieval_url,
    "reward_workers": _reward_workers,
    # A size for a local Ray; null if the run joins a cluster, which has its sizes already.
    "local_ray": lambda size, nodes, address: None if _joins(nodes, address) else size,
    # 1 if other machines must reach Ray's servers, else 0: they then listen on 127.0.0.1.
    "ray_beyond_loopback": lambda address: int(address is not None and not is_loopback(address)),
    "verl_config": verl_config,
}
for _name, _resolver in _RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


def cpus_reserved(config: DictConfig) -> int:
    """Logical CPUs Ray must count, or veRL 0.9.1 waits forever (ResourcePoolManager and RolloutReplica).

    CPUS_A_GPU for each training GPU, 2 for each sampling GPU, 1 for the transfer queue's controller and each
    of its storage units, and 4 for all other actors and tasks.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    training = CPUS_A_GPU * trainer.n_gpus_per_node * trainer.nnodes
    return training + 2 * rollout.nnodes * rollout.n_gpus_per_node + 1 + units + 4


def detect_hardware() -> str:
    """This machine's hardware profile: 8xh100 from 8 GPUs, single_gpu from 1, else cpu."""
    gpus = gpus_here()
    return "8xh100" if gpus >= 8 else "single_gpu" if gpus else "cpu"


def fitting_hardware(overrides: Sequence[str]) -> str:
    """The hardware profile of the declared machine (`compute=…`), else of this one."""
    declared = [override.partition("=")[2] for override in overrides if override.startswith("compute=")]
    path = CONFIG_DIR / "compute" / f"{declared[-1] if declared else 'local'}.yaml"
    # check_overrides refuses an unknown option.
    hardware = OmegaConf.load(path).compute.get("hardware") if path.is_file() else None
    return hardware or detect_hardware()


def compose_stage(stage: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `config/{stage}.yaml` with overrides and absolute paths. Raises OverrideError."""
    overrides = with_environment(stage, in_full(stage, overrides))
    if not any(override.startswith("hardware=") for override in overrides):
        overrides.insert(0, f"hardware={fitting_hardware(overrides)}")
    schema = schema_of(stage)
    split = [override for override in overrides if key_of(override) == SERVE_GPUS]
    has_split = schema.has_verl and split and not split[-1].endswith("=null")
    if has_split and not any(override.startswith("mode=") for override in overrides):
        overrides.insert(0, "mode=separate_async")
    if ignored := [override for override in overrides if schema.ignores(key_of(override))]:
        # Only a stage with veRL can say whether these exist.
        groups = [o for o in overrides if o.startswith(("hardware=", "model=", "compute=", "env="))]
        check_overrides([*groups, *ignored], CONFIG_DIR, schema_of("challenger"))
    config = check_overrides(overrides, CONFIG_DIR, schema)
    _refuse_own_service(config, stage, overrides)
    if schema.has_verl and (reason := fault(config)):
        raise OverrideError(f"{split[-1]!r}: {reason}" if split else f"{SERVE_GPUS}: {reason}").of(SERVE_GPUS)
    with open_dict(config):
        for name, path in config.paths.items():
            config.paths[name] = os.path.abspath(path)
        config.run.dir = os.path.abspath(config.run.dir)
        if "actor_rollout_ref" in config:
            rollout = config.actor_rollout_ref.rollout
            # Users' arguments win over the recipe's.
            rollout.engine_kwargs = OmegaConf.merge(
                rollout.engine_kwargs, {rollout.name: config.rollout.server_args}
            )
    return config


def _refuse_own_service(config: DictConfig, stage: str, overrides: Sequence[str]) -> None:
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
        key = key_of(override)
        if key.startswith("retrieval.") and key.removeprefix("retrieval.") not in SHARED:
            raise OverrideError(
                f"{override!r}: with retrieval.url={url} no service is started here that would read {key}: "
                "leave one of the two out"
            ).of(override)


def with_environment(stage: str, overrides: Sequence[str]) -> list[str]:
    """Replace `env=NAME` by the group `environment` and NAME, unless NAME is a corpus of the group `env`.

    `agent=NAME` is the environment `agent:NAME`, `tasks=FILE` the file of its tasks, and `agent_options.KEY`
    an argument of its function.
    """
    if stage not in WITH_ENVIRONMENT:
        return list(overrides)
    written: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        value = value.strip("'\"")
        if stage != "agent_bench" and (own := _of_agent(key, value)):
            written += own
            continue
        name = canonical(value)
        if key != "env" or (stage == "evaluate" and name in options("env")):  # a corpus
            written.append(override)
            continue
        group = name if name in options("environment") else "named"
        written += [f"environment={group}", assigned("environment.name", name)]
    typed = {key_of(override): override.partition("=")[2] for override in written}
    in_environment = stage == "evaluate" and not {"environment", "environment.name"}.isdisjoint(typed)
    if in_environment and typed.get("iteration", "0") != "0":
        raise OverrideError(
            f"iteration={typed['iteration']} names a solver of the search loop: leave it out, and name the "
            "model (base_model=…/solver_iter2_hf)"
        )
    return written


def _of_agent(key: str, value: str) -> list[str]:
    key = key.lstrip("+")
    if key == "tasks":
        return [assigned("environment.options.data", os.path.abspath(value))]
    if key.startswith("agent_options."):
        return [f"+environment.options.arguments.{key.removeprefix('agent_options.')}={value}"]
    if key != "agent":
        return []
    file, colon, function = value.partition(".py:")
    # The trainer may run in another folder.
    place = f"{os.path.abspath(file)}.py:{function}" if colon else value
    return ["environment=agent", assigned("environment.name", f"agent:{place}")]


def compose_plain(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `config/{name}.yaml` without checking or filling in any value."""
    schema = schema_of(name)
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose(name, overrides=for_stage(overrides, schema))
    with open_dict(config):
        schema.prune(config)
    return config


def resolve(config: DictConfig) -> DictConfig:
    """The config without interpolations, with Ray's address and CPUs. Raises OmegaConf's error."""
    resolved = DictConfig(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
    # Only stages with a trainer compose veRL's part, and a user may delete keys of Ray's.
    ray = OmegaConf.select(resolved, "ray_kwargs.ray_init") if "agent_loops" in resolved else None
    if ray is not None:
        # "local" starts a Ray of the run's own, even if RAY_ADDRESS is set.
        if "address" in ray:
            ray.address = ray.address or resolved.machine.ray_address or "local"
        if "num_cpus" in ray and ray.num_cpus is None and not joins_cluster(resolved):
            ray.num_cpus = cpus_reserved(resolved)
    return resolved


def first_broken(config: DictConfig) -> tuple[tuple[str, str], OmegaConfBaseException] | None:
    """The key, text and error of an interpolation that fails although all keys it names resolve."""
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
    """Write the config and a trainer's `search_tool` and `agent_loops` into the run's folder."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if "agent_loops" in config:  # only the stages with a trainer compose veRL's part
        atomic_write(folder / "search_tool_config.yaml", OmegaConf.to_yaml(config.search_tool))
        atomic_write(folder / "agent_loops.yaml", OmegaConf.to_yaml(config.agent_loops.loops))
    return write_as_run(config, folder)


def write_as_run(config: DictConfig, folder: Path) -> Path:
    """Write a config into a folder with the run's command and versions, and return its path."""
    path = folder / f"{RESOLVED}.yaml"
    # `plain`, because several characters would end a YAML comment.
    command = plain(shlex.join(sys.argv)).replace("\n", "\\n")
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    head = f"# command: {command}\n# versions: {versions}\n"
    atomic_write(path, head + OmegaConf.to_yaml(config))
    return path


def process_env(config: DictConfig) -> dict[str, str]:
    """Environment variables of the hardware profile and the log level."""
    level = str(config.log_level).upper()
    levels = {"DRZERO_LOG_LEVEL": level, "VERL_LOGGING_LEVEL": level, "TQ_LOGGING_LEVEL": level}
    # Only at DEBUG, because Ray prints a line about it in every process.
    ray = {"RAY_BACKEND_LOG_LEVEL": "debug"} if level == "DEBUG" else {}
    env = levels | ray | {name: str(value) for name, value in config.process_env.items()}
    ordered = visible_devices(config.machine, env.get(VISIBLE, os.environ.get(VISIBLE)))
    return env | ({VISIBLE: ordered} if ordered else {})


def verl_env(config: DictConfig) -> dict[str, str]:
    """`process_env` plus variables for processes that import veRL."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin",
        # veRL warns in every process of engines that are not installed.
        "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",
        **process_env(config),
    }
