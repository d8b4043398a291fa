"""A check's input: the resolved config, the declared machine, and a cache of file contents."""

from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drzero.ops.errors import UserError
from drzero.ops.resources.cuda import Sight
from drzero.preflight.finding import PreflightFailed, refusal
from drzero.preflight.machine import Machine
from drzero.preflight.model_shape import ModelShape, load_shape
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.environment import load_taskset
from drzero.recipe.indices import index_of
from environments.fault import EnvironmentUnusable
from environments.taskset import Taskset
from search.stored_index import CollectionInfo, Index


@dataclass
class Readings:
    """A cache, so that the stages of a loop read each file once."""

    tokenizers: dict[str, Any] = field(default_factory=dict)
    """By model. An unusable one has its PreflightFailed, so that no check tries again."""
    indices: dict[Index, CollectionInfo] = field(default_factory=dict)
    token_counts: dict[tuple[str, str, int], tuple[dict[int, int], int | None]] = field(default_factory=dict)
    source_bytes: dict[str, int] = field(default_factory=dict)
    runs: dict[Path, DictConfig] = field(default_factory=dict)
    """The settings of earlier runs, by file."""
    out_of_reach: set[str] = field(default_factory=set)
    """Models that a hub which does not answer may have, as found so far."""
    sight: Sight | None = None


_WITHOUT_CORPUS = ("merge", "prepare_data", "serve_model", "compare_rollouts", "agent_bench", "flow_test")


@dataclass
class CheckContext:
    """One stage under preflight."""

    config: DictConfig
    stage: str
    machine: Machine
    starting: bool  # Whether the run starts here right after preflight
    ahead: bool  # Whether a loop's earlier stages have yet to run, so that their outputs may be missing
    readings: Readings
    _taskset: Taskset | None = None

    @property
    def trains(self) -> bool:
        """Whether veRL runs."""
        return self.stage in ("challenger", "solver", "train")

    @property
    def plays(self) -> bool:
        """Whether the stage runs in an environment other than corpus search."""
        environment = self.config.get("environment")
        return self.stage == "train" or bool(environment and environment.name)

    def taskset(self) -> Taskset:
        """The environment's taskset. Raises EnvironmentUnusable."""
        if self._taskset is None:
            self._taskset = load_taskset(self.config)
        return self._taskset

    @property
    def serves_model(self) -> bool:
        """Whether a model is served outside veRL."""
        if self.stage in ("evaluate", "synthesize", "preview", "ask", "serve_agent", "compare_rollouts"):
            return self.config.endpoint is None
        if self.stage == "agent_bench":
            return bool(self.config.serve)
        return self.stage in ("challenger", "serve_model", "warm_start")

    @property
    def searches(self) -> bool:
        """Whether the stage searches the corpus."""
        if self.plays:
            with suppress(EnvironmentUnusable):  # `check_environment` reports it
                return self.taskset().needs_retrieval
            return False
        return self.stage not in _WITHOUT_CORPUS

    @property
    def serves_search(self) -> bool:
        """Whether the run starts a retrieval service."""
        return self.searches and self.config.retrieval.url is None

    @property
    def embeds(self) -> bool:
        """Whether the embedding model is loaded, by the service or to compare questions."""
        serves = self.serves_search and self.stage != "bundle"
        return serves or self.stage in ("synthesize", "preview", "warm_start")

    def sees(self, root: str) -> bool:
        """Whether files below `paths.{root}` can be read from here, unlike another machine's volume."""
        return self.machine.is_local or self.starting or Path(self.config.paths[root]).is_dir()

    def is_of_the_loop(self, path: str | Path) -> bool:
        """Whether an earlier stage of the loop makes this path."""
        return self.ahead and Path(path).is_relative_to(self.config.paths.checkpoints)

    def is_to_come(self, path: str | Path) -> bool:
        """Whether an earlier stage of the loop has yet to make this path."""
        return self.is_of_the_loop(path) and not Path(path).exists()

    def index_info(self) -> CollectionInfo:
        """How the configured index was built. Raises PreflightFailed if it cannot be served."""
        index, known = index_of(self.config), self.readings.indices
        if index not in known:
            try:
                with closing(index.open()) as store:
                    known[index] = store.info
            except UserError as why:  # its message has the advice
                raise refusal(index.setting, " ".join(str(why).split()), "") from why
        return known[index]

    def load_tokenizer(self, model: str, key: str) -> Any:
        """A model's tokenizer. Raises PreflightFailed if it cannot be used."""
        known = self.readings.tokenizers
        if model not in known:
            try:
                searches = self.searches or not (self.plays or self.stage == "serve_model")
                known[model] = load_chat_tokenizer(model, key, searches=searches)
            except PreflightFailed as failed:
                known[model] = failed
        if isinstance(known[model], PreflightFailed):
            raise known[model]
        return known[model]

    @property
    def policy(self) -> str:
        """The model whose tokenizer counts the prompts."""
        asked = str(self.config.get("challenger") or "")
        if self.stage == "synthesize" and (Path(asked) / "tokenizer_config.json").is_file():
            return asked
        return str(self.config.actor_rollout_ref.model.path if self.trains else self.config.base_model)

    @property
    def model_played(self) -> str:
        """The model that plays an environment's episodes."""
        return str(self.config.actor_rollout_ref.model.path if self.trains else self.config.solver.model_path)

    def models(self) -> dict[str, str]:
        """The models that the stage loads, by the key that sets them."""
        config = self.config
        solver = {"solver.model_path": config.solver.model_path}
        served = solver if self.serves_model else {}
        start = {}
        if self.trains:
            model = config.actor_rollout_ref.model.path
            start["base_model" if model == config.base_model else "actor_rollout_ref.model.path"] = model
        models = {
            "challenger": start | served,
            "solver": start,
            "train": start,
            "synthesize": {"challenger": config.get("challenger") if self.serves_model else None},
            "preview": served,
            "warm_start": {"base_model": config.base_model},
            "serve_model": served,
            "bundle": solver,
            "agent_bench": served,
            "compare_rollouts": {"base_model": config.base_model, **served},
            **dict.fromkeys(
                ("evaluate", "ask", "serve_agent"), served or {"tokenizer": config.get("tokenizer")}
            ),
        }.get(self.stage, {})
        return {key: str(model) for key, model in models.items() if model}

    def shape(self, model: str) -> ModelShape | None:
        """A model's sizes. An export that a loop will make has its base model's."""
        try:
            known = load_shape(model)
            made_of_base = known is None and not Path(model).exists() and "/" in model
            is_export = Path(model).is_relative_to(self.config.paths.checkpoints)
            return load_shape(self.config.base_model) if made_of_base and is_export else known
        except (ValueError, KeyError, TypeError):  # an invalid config.json, which `check_models` reports
            return None
