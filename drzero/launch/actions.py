"""What `modal run modal_train.py --action X` runs, and on which machine, as data: `find_action("merge")`."""

from dataclasses import dataclass

from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean


@dataclass(frozen=True)
class Action:
    """One action. Run file and flags can replace its machine."""

    name: str
    help: str
    stage: str | None = None  # The `drzero` command it runs in a container. None: the launcher does it.
    compute: str | None = "cpu"
    """Its default machine, a file of `config/compute/`. None: the smallest that holds the model."""
    preflight: bool = False  # Whether `drzero preflight STAGE` checks it before its machine is requested
    trains: bool = False
    of_stage: bool = False  # Whether it takes the name of a stage, by default the challenger

    @property
    def is_job(self) -> bool:
        """Whether it is a run: resumed, and billed by the hour."""
        return self.stage is not None and self.preflight


_TABLE = (
    Action(
        "smoke", "a check on a CPU, then probes and three steps on two GPUs", "challenger", "2xa10g", True
    ),
    Action("prepare-data", "index a corpus and write challenger prompts", "prepare-data", preflight=True),
    Action("challenger", "train the challenger", "challenger", None, True, True),
    Action("warm-start", "learn from conversations that passed the gates", "warm-start", "single_h100", True),
    Action("synthesize", "its questions, gated, as solver data", "synthesize", None, True),
    Action("solver", "train the solver on them", "solver", None, True, True),
    Action("train", "GRPO in any environment: --env wordle", "train", None, True, True),
    Action("merge", "the solver's checkpoint as a model folder", "merge", preflight=True),
    Action("evaluate", "exact match on the benchmarks, or --env wordle", "evaluate", None, True),
    Action("evolve", "the whole loop", "evolve", None, True, True),
    Action(
        "check-services",
        "one question through a stage's services: check-services [STAGE] [--with-trainer]",
        "check-services",
        None,
        True,
        of_stage=True,
    ),
    Action("compare-rollouts", "an engine against Transformers", "compare-rollouts", None, True),
    Action("agent-bench", "your agent with its model: agent-bench FILE.py:NAME", "agent-bench", None, True),
    Action("serve-model", "a model at a public address, for an hour", "serve-model", None, True),
    Action("flow-test", "made-up samples through the trainer's real queues", "flow-test", preflight=True),
    Action(
        "preflight",
        "check a stage, estimate its cost, start nothing: preflight [STAGE]",
        "preflight",
        of_stage=True,
    ),
    Action("status", "progress and cost of the loop and the launches", "status"),
    Action("stacks", "where all processes of a running launch stand now"),
    Action("diagnose", "why a run ended or stalled", "diagnose"),
    Action("list-models", "models on the volumes, and what would be downloaded", "list-models"),
    Action("upload", "files to the corpus volume: upload LOCAL [REMOTE]"),
    Action("download", "files from the checkpoints volume: download REMOTE [LOCAL]"),
    Action("logs", "a run's output"),
)
ACTIONS = {action.name: action for action in _TABLE}


def find_action(name: str) -> Action:
    """The action. Raises LaunchError with the nearest name for an unknown one."""
    if name not in ACTIONS:
        raise LaunchError(
            f"--action {name}: no such action{did_you_mean(name, ACTIONS)}. Actions: {', '.join(ACTIONS)}"
        )
    return ACTIONS[name]
