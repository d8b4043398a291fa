"""The command line: `drzero COMMAND OVERRIDES…`, overrides in Hydra's own grammar.

    drzero demo                                               a rehearsal on this machine
    drzero demo-data                                          its corpus, prompts and models alone
    drzero smoke                                              one step of it, always from the start
    drzero preview source=papers.jsonl endpoint=URL model=…   what a corpus is worth: questions, rates, cost
    drzero prepare-data chroma.path=my/chromadb               prompts from your corpus
    drzero evolve hardware=8xh100 model=qwen2.5-3b            the whole loop, resumable; its stages alone:
      drzero challenger | synthesize | solver | merge | evaluate  iteration=1 …
    drzero train env=wordle model=qwen2.5-3b steps=200        GRPO in any environment (docs/environments.md)
    drzero evaluate env=wordle model=qwen2.5-3b               a model in one
    drzero compare BEFORE AFTER                               two evaluations, in pairs
    drzero preflight STAGE OVERRIDES… [--json]                what would go wrong, before anything is paid for
    drzero check-services STAGE OVERRIDES…                    one question through its services
      --with-trainer                                          one prompt through its trainer, no update
    drzero flow-test --seconds 30                             veRL's queues: rates against need, no model
    drzero compare-rollouts model=… data=… n=64               whether an engine computes as Transformers does
    drzero status                                             how far the loop is
    drzero report outputs/checkpoints/demo [--watch]          a run as one HTML file: curves, every trajectory
    drzero export-log outputs/checkpoints/demo                its trajectories in Inspect AI's log format
    drzero top outputs/checkpoints/challenger_iter1           a run's progress, parts and resources, live
    drzero stacks outputs/checkpoints/challenger_iter1        where all processes of a live run stand now
    drzero diagnose outputs/checkpoints/challenger_iter1      why a run ended or stands still
    drzero config retrieval.topk                              a config key: values, default, what it changes
    drzero list-models                                        what model= names, and which of them are local
    drzero fetch-models challenger model=qwen2.5-3b           downloads a stage's models into the hub's cache
    drzero serve-search chroma.path=my/chromadb               the retrieval service alone
    drzero serve-model model=smollm2-135m port=8080           a model alone, for OpenAI's client
    drzero agent-bench my_agent.py:MyAgent mode=concurrent    an agent of your own before it trains

`drzero COMMAND --help` explains one of them. `key=value` changes a key, `+key=value` adds one, `group=option`
swaps a group (model, hardware, mode, compute). With DRZERO_STOP_AT (Unix seconds) set, a stage ends itself in
time, with exit code 75; the same command resumes it (docs/stopping.md).
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from drzero.ops.bearer import MODEL_KEY
from drzero.ops.console import leave_stdout, set_verbose
from drzero.ops.errors import OutOfTime, RunFailed, UserError
from drzero.ops.text import did_you_mean

# The disk is full, over quota or read-only: not a bug, so no traceback.
_STORAGE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
# All that is read of .env, which is the current folder's: a PYTHONPATH in it would run code in every child.
_FROM_DOTENV = {"WANDB_API_KEY", "WANDB_ENTITY", "HF_TOKEN", "RETRIEVAL_TOKEN", "CHROMA_API_KEY", MODEL_KEY}


@dataclass(frozen=True)
class CliCommand:
    """What runs a command, imported only when it runs: `drzero --help` must not load torch."""

    function: str
    """`module:function`; it gets the composed config. Without `config` it gets the arguments, and returns the
    exit code if that is not 0."""
    config: str | None = None
    """The file in config/ to compose first, so that a mistyped key is reported before large imports."""
    overrides: str | None = None
    """`module:function` that turns the command's own options into overrides; without `config` the command
    itself calls it."""
    reports: bool = False
    """Whether the run's page is written when it ends (drzero/report)."""
    timed: bool = True
    """Whether it needs time left before DRZERO_STOP_AT; a command that only reads does not."""
    stage: str | None = None
    """The config whose keys its help lists, where it is not `config`."""
    keys: tuple[str, ...] = ()
    """The keys and groups that its help lists; without them, what its stage has on top of the common ones."""

    def __call__(self, arguments: Sequence[str]) -> int | None:
        """Run it; returns the exit code, None for 0."""
        if self.config is None:
            result = _load(self.function)(arguments)
            return result if isinstance(result, int) else None
        from drzero.recipe.compose import compose_stage
        from drzero.runs.report.write import reported

        overrides = _load(self.overrides)(arguments) if self.overrides else arguments
        config = compose_stage(self.config, overrides)
        set_verbose(config.verbose)
        with reported(Path(config.run.dir)) if self.reports else nullcontext():
            _load(self.function)(config)
        return None

    def help(self) -> str:
        """What it does, with examples, and its keys; neither it nor Hydra is imported for that."""
        from drzero.commands.help import command_help

        return command_help(self.function.partition(":")[0], self.stage or self.config, self.keys)


COMMANDS = {
    "demo": CliCommand(
        "drzero.stages.demo:run_demo",
        "challenger",
        overrides="drzero.stages.demo:demo_overrides",
        reports=True,
        keys=("paths",),
    ),
    "demo-data": CliCommand("drzero.stages.demo:prepare_demo", stage="prepare_data", keys=("paths",)),
    "smoke": CliCommand(
        "drzero.stages.demo:run_demo",
        "challenger",
        overrides="drzero.stages.demo:smoke_overrides",
        reports=True,
        keys=("paths",),
    ),
    "prepare-data": CliCommand("drzero.stages.prepare_data:run_prepare_data", "prepare_data"),
    "preview": CliCommand(
        "drzero.stages.preview:run_preview",
        "preview",
        overrides="drzero.stages.endpoint:preview_overrides",
        reports=True,
    ),
    "challenger": CliCommand("drzero.stages.training:run_challenger", "challenger", reports=True),
    "synthesize": CliCommand("drzero.stages.synthesize:run_synthesize", "synthesize", reports=True),
    "solver": CliCommand("drzero.stages.training:run_solver", "solver", reports=True),
    "train": CliCommand("drzero.stages.train:run_train", "train", reports=True),
    "merge": CliCommand("drzero.stages.merge:run_merge", "merge", reports=True),
    "evaluate": CliCommand("drzero.stages.evaluation:run_evaluation", "evaluate", reports=True),
    "compare": CliCommand("drzero.commands.compare:run_compare", timed=False),
    "evolve": CliCommand("drzero.loop.evolve:run_evolve", stage="evolve"),
    "preflight": CliCommand("drzero.commands.preflight:run_preflight", timed=False),
    "check-services": CliCommand("drzero.labs.check_services:run_check_services", timed=False),
    "flow-test": CliCommand("drzero.labs.flow_test:flow_test", timed=False, stage="flow_test"),
    "compare-rollouts": CliCommand(
        "drzero.labs.compare_rollouts:run_compare_rollouts",
        "compare_rollouts",
        overrides="drzero.labs.compare_rollouts:compare_overrides",
        timed=False,
    ),
    "status": CliCommand(
        "drzero.commands.status:run_status", "prepare_data", timed=False, keys=("paths.checkpoints",)
    ),
    "report": CliCommand("drzero.runs.report.command:run_report", timed=False),
    "export-log": CliCommand("drzero.runs.export_log:run_export_log", timed=False),
    "diagnose": CliCommand("drzero.runs.diagnose:run_diagnose", timed=False),
    "stacks": CliCommand("drzero.runs.stacks:run_stacks_now", timed=False),
    "top": CliCommand("drzero.runs.top:run_top", timed=False),
    "config": CliCommand("drzero.commands.config:run_config", timed=False),
    "list-models": CliCommand("drzero.commands.models:run_list_models", stage="merge", keys=("paths",)),
    "fetch-models": CliCommand("drzero.commands.models:run_fetch_models"),
    "serve-search": CliCommand(
        "drzero.commands.serve_search:run_serve_search",
        "serve_search",
        timed=False,
        keys=("chroma", "retrieval"),
    ),
    "serve-model": CliCommand("drzero.commands.serve_model:run_serve_model", "serve_model", timed=False),
    "agent-bench": CliCommand(
        "drzero.labs.agent_bench:run_agent_bench",
        overrides="drzero.labs.agent_bench:agent_bench_overrides",
        timed=False,
        stage="agent_bench",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 when it succeeded, 2 for a mistake in what was asked, 1 for a run that failed, 75 (EX_TEMPFAIL) for one
    that ended itself in time; rerunning resumes it.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        _show(__doc__ or "")
        return 0
    name, words = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        hint = did_you_mean(name, COMMANDS)
        print(f"drzero: no command {name!r}{hint}. Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(words):
        _show(command.help())
        return 0
    try:
        return _run(name, command, words)
    except (UserError, RunFailed, OutOfTime) as error:
        message, code = str(error), error.exit_code
    except FileNotFoundError as error:
        message, code = str(error), 2
    except OSError as error:
        if error.errno not in _STORAGE_FAULTS:
            raise
        advice = "Make room or choose another place (paths.checkpoints=…), then rerun to resume"
        place = error.filename or "a file of the run"
        message, code = f"{place} cannot be written: {error.strerror}. {advice}", 2
    except KeyboardInterrupt:
        message, code = "interrupted; rerun to resume", 130
    print(f"drzero {name}: {message}", file=sys.stderr)
    return code


def _show(text: str) -> None:
    """Print help, whose reader may stop before its end (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_stdout()


def _run(name: str, command: CliCommand, arguments: Sequence[str]) -> int:
    from dotenv import dotenv_values
    from omegaconf.errors import OmegaConfBaseException

    from verl_ext.stop_time import require_time

    for key, value in dotenv_values(Path(".env")).items():
        if key in _FROM_DOTENV and value:
            os.environ.setdefault(key, value)
    # A library's progress bars and advice would drown the run's own output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if command.timed:
            require_time(name)
        return command(arguments) or 0
    except OmegaConfBaseException as error:
        raise UserError(str(error)) from error


def _load(function: str) -> Callable[[Any], Any]:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
