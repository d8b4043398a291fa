"""The command line, and the one table of its commands.

    drzero evolve hardware=8xh100 model=qwen2.5-3b

`drzero --help` is made of the table, `drzero COMMAND --help` of the docstring of the command's module.
"""

import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from drzero.ops.bearer import AGENT_KEY, MODEL_KEY
from drzero.ops.console import leave_stdout, replace_unshowable, set_verbose
from drzero.ops.errors import OutOfTime, RunFailed, UserError
from drzero.ops.notices import plain
from drzero.ops.proxies import check_proxies, spare_loopback
from drzero.ops.text import did_you_mean

# The disk is full, over quota or read-only: not a bug, so no traceback.
_STORAGE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
# Nothing else is read from .env in the current folder: a PYTHONPATH there would run code in every child.
_FROM_DOTENV = {
    "WANDB_API_KEY",
    "WANDB_ENTITY",
    "HF_TOKEN",
    "RETRIEVAL_TOKEN",
    "CHROMA_API_KEY",
    AGENT_KEY,
    MODEL_KEY,
}


@dataclass(frozen=True)
class CliCommand:
    """Its module is imported only when it runs: `drzero --help` must not load torch."""

    function: str
    """`module:function`. Takes the composed config, without `config` the arguments. Returns the exit code."""
    about: str = ""  # for `drzero --help`, at most 30 characters
    config: str | None = None
    """The file in config/ to compose before large imports, so that a mistyped key is reported at once."""
    overrides: str | None = None
    """`module:function`: its options as overrides. Without `config`, the command itself calls it."""
    reports: bool = False  # writes the run's page at its end
    shown: bool = False  # takes the live view as its second argument
    timed: bool = True  # needs time left before DRZERO_STOP_AT
    stage: str | None = None  # the config whose keys its help lists, if not `config`
    keys: tuple[str, ...] = ()  # for its help, by default the stage's own

    def __call__(self, arguments: Sequence[str]) -> int | None:
        """Returns the exit code, or None for 0."""
        if self.config is None:
            result = _load(self.function)(arguments)
            return result if isinstance(result, int) else None
        from drzero.recipe.compose import compose_stage
        from drzero.runs.report.write import reported

        overrides = _load(self.overrides)(arguments) if self.overrides else arguments
        config = compose_stage(self.config, overrides)
        set_verbose(config.verbose)
        view = [_load("drzero.runs.view.follow:following")] if self.shown else []
        with reported(Path(config.run.dir)) if self.reports else nullcontext():
            _load(self.function)(config, *view)
        return None

    def help(self) -> str:
        """Its docstring and keys. Imports neither the command nor Hydra."""
        from drzero.commands.help import command_help

        return command_help(self.function.partition(":")[0], self.stage or self.config, self.keys)


def _stage(function: str, about: str, config: str, overrides: str = "", **more: Any) -> CliCommand:
    completed = f"drzero.stages.{overrides}" if overrides else None
    return CliCommand(f"drzero.stages.{function}", about, config, completed, reports=True, **more)


def _demo(about: str, overrides: str) -> CliCommand:
    return _stage("demo:run_demo", about, "challenger", f"demo:{overrides}", shown=True, keys=("paths",))


def _reader(function: str, about: str, **more: Any) -> CliCommand:
    return CliCommand(f"drzero.{function}", about, timed=False, **more)


STAGES = {
    "demo": _demo("a rehearsal on this machine", "demo_overrides"),
    "smoke": _demo("one step of it, from the start", "smoke_overrides"),
    "demo-data": CliCommand(
        "drzero.stages.demo:prepare_demo",
        "its corpus, prompts and models",
        stage="prepare_data",
        keys=("paths",),
    ),
    "preview": _stage(
        "preview:run_preview", "what your corpus is worth", "preview", "models:preview_overrides"
    ),
    "warm-start": _stage(
        "warm_start:run_warm_start",
        "learn from good conversations",
        "warm_start",
        "models:warm_start_overrides",
    ),
    "prepare-data": CliCommand(
        "drzero.stages.prepare_data:run_prepare_data", "prompts from your corpus", "prepare_data"
    ),
    "evolve": CliCommand("drzero.loop.evolve:run_evolve", "the whole loop, resumable", stage="evolve"),
    "challenger": _stage("training:run_challenger", "train the challenger (HRPO)", "challenger", shown=True),
    "synthesize": _stage("synthesize:run_synthesize", "write the solver's questions", "synthesize"),
    "solver": _stage("training:run_solver", "train the solver (GRPO)", "solver", shown=True),
    "merge": _stage("merge:run_merge", "checkpoint to model folder", "merge"),
    "evaluate": _stage("evaluate.run:run_evaluate", "score a model", "evaluate", "models:evaluate_overrides"),
    "train": _stage("train:run_train", "GRPO in any environment", "train", shown=True),
}
READERS = {
    "status": _reader(
        "commands.status:run_status",
        "how far the loop is",
        config="prepare_data",
        keys=("paths.checkpoints",),
    ),
    "report": _reader("runs.report.write:run_report", "a run as an HTML page"),
    "top": _reader("runs.top:run_top", "a run in progress, live"),
    "stacks": _reader("runs.stacks:run_stacks_now", "where its processes stand"),
    "diagnose": _reader("runs.diagnose:run_diagnose", "why a run ended or stalled"),
    "compare": _reader("commands.compare:run_compare", "two evaluations, in pairs"),
    "export-log": _reader("runs.report.inspect_log:run_export_log", "trajectories for Inspect AI"),
}
TRIALS = {
    "preflight": _reader("commands.preflight:run_preflight", "what would go wrong, and cost"),
    "check-services": _reader("labs.check_services:run_check_services", "a question through services"),
    "flow-test": _reader("labs.flow_test:flow_test", "veRL's queues, without a model", stage="flow_test"),
    "compare-rollouts": _reader(
        "labs.compare_rollouts:run_compare_rollouts",
        "an engine against Transformers",
        config="compare_rollouts",
    ),
    "agent-bench": _reader(
        "labs.agent_bench:run_agent_bench",
        "your own agent, before it runs",
        overrides="drzero.labs.agent_bench:agent_bench_overrides",
        stage="agent_bench",
    ),
    "config": _reader("commands.config:run_config", "a config key, explained"),
    "list-models": CliCommand(
        "drzero.commands.models:run_list_models", "what model= names", stage="merge", keys=("paths",)
    ),
    "fetch-models": CliCommand("drzero.commands.models:run_fetch_models", "download a stage's models"),
    "serve-search": _reader(
        "commands.serve_search:run_serve_search",
        "the retrieval service alone",
        config="serve_search",
        keys=("chroma", "retrieval"),
    ),
    "serve-model": _reader(
        "commands.serve_model:run_serve_model", "a model for OpenAI's client", config="serve_model"
    ),
}
USES = {
    "ask": _reader("agent.ask:run_ask", "put a question to the agent", stage="ask"),
    "bundle": _reader("agent.write_bundle:run_bundle", "the agent as one folder", stage="bundle"),
    "serve-agent": _reader("agent.serve:run_serve_agent", "the agent as a service", stage="serve_agent"),
}
COMMANDS = {**STAGES, **READERS, **TRIALS, **USES}
_HELP = """\
drzero COMMAND [KEY=VALUE | +KEY=VALUE | GROUP=OPTION]…     drzero COMMAND --help  explains one
{commands}
With DRZERO_STOP_AT (Unix seconds) set, a stage ends in time with exit code 75. Rerun it to resume."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 2 for the command line or input, 1 for a failed run, 75 (EX_TEMPFAIL): rerun to resume."""
    replace_unshowable()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        _show(_overview())
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
    # A config is thousands of nodes that live on: by default the collector walks them again and again.
    gc.set_threshold(20_000)
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
    print(f"drzero {name}: {plain(message)}", file=sys.stderr)
    return code


def _overview() -> str:
    """In two columns, on one screen of 24 lines and 100 columns."""
    groups = {
        "A run's stages": STAGES,
        "What reads or uses a run": READERS | USES,
        "What you try before one": TRIALS,
    }
    lines = []
    for title, commands in groups.items():
        cells = [f"  {name:<17}{command.about:<30}" for name, command in commands.items()]
        rows = -(-len(cells) // 2)
        lines += [f"{title}:", *("".join(cells[row::rows]).rstrip() for row in range(rows)), ""]
    return _HELP.format(commands="\n".join(lines[:-1]))


def _show(text: str) -> None:
    """Its reader may stop before the end (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_stdout()


def _run(name: str, command: CliCommand, arguments: Sequence[str]) -> int:
    from dotenv import dotenv_values
    from omegaconf.errors import OmegaConfBaseException

    from drzero.ops.stop_time import require_time

    for key, value in dotenv_values(Path(".env")).items():
        if key in _FROM_DOTENV and value:
            os.environ.setdefault(key, value)
    if name not in READERS:
        check_proxies()
    spare_loopback()
    # A library's progress bars and advice would drown the run's own output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if command.timed:
            require_time(name)
        return command(arguments) or 0
    except OmegaConfBaseException as error:
        raise UserError(str(error)) from error


def _load(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
