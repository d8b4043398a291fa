"""The command line: `drzero COMMAND OVERRIDES…`, overrides in Hydra's own grammar.

    drzero demo                                               a rehearsal on this machine
    drzero demo-data                                          its corpus, prompts and models alone
    drzero smoke                                              one step of it, always from the start
    drzero prepare-data chroma.path=my/chromadb               prompts from your corpus
    drzero evolve hardware=8xh100 model=qwen2.5-3b            the whole loop, resumable; its stages alone:
      drzero challenger | synthesize | solver | merge | evaluate  iteration=1 …
    drzero preflight STAGE OVERRIDES… [--json]                what would go wrong, before anything is paid for
    drzero check-services STAGE OVERRIDES…                    one question through its services
    drzero flow-test --seconds 30                             veRL's queues and buffer, without a model
    drzero status                                             how far the loop is
    drzero diagnose outputs/checkpoints/challenger_iter1      why a run ended or stands still
    drzero config retrieval.topk                              a config key: values, default, what it changes
    drzero list-models                                        what model= names, and which of them are local
    drzero fetch-models challenger model=qwen2.5-3b           downloads a stage's models into the hub's cache
    drzero serve-search chroma.path=my/chromadb               the retrieval service alone

`drzero COMMAND --help` explains one of them. `key=value` changes a key, `+key=value` adds one, `group=option`
swaps a group (model, hardware, mode, compute). With DRZERO_STOP_AT (Unix seconds) set, a stage ends itself in
time, with exit code 75; the same command resumes it (docs/stopping.md).
"""

import ast
import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ops.errors import OutOfTime, RunFailed, UserError

# The disk is full, over quota or read-only: not a bug, so no traceback.
_STORAGE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
# All that is read of .env, which is the current folder's: a PYTHONPATH in it would run code in every child.
_FROM_DOTENV = {"WANDB_API_KEY", "WANDB_ENTITY", "HF_TOKEN", "RETRIEVAL_TOKEN", "CHROMA_API_KEY"}


@dataclass(frozen=True)
class CliCommand:
    """What runs a command, imported only when it runs: `drzero --help` must not load torch."""

    function: str
    """`module:function`; it gets the composed config. Without `config` it gets the arguments, and returns the
    exit code if that is not 0."""
    config: str | None = None
    """The file in config/ to compose first, so that a mistyped key is reported before large imports."""
    overrides: str | None = None
    """`module:function` that turns the command's own options into overrides."""
    timed: bool = True
    """Whether it needs time left before DRZERO_STOP_AT; a command that only reads does not."""

    def __call__(self, arguments: Sequence[str]) -> int | None:
        """Run it; returns the exit code, None for 0."""
        if self.config is None:
            result = _load(self.function)(arguments)
            return result if isinstance(result, int) else None
        from pipeline.compose import compose_stage

        overrides = _load(self.overrides)(arguments) if self.overrides else arguments
        config = compose_stage(self.config, overrides)
        _load(self.function)(config)
        return None

    def help(self) -> str:
        """The docstring of its module, read without importing it."""
        module = self.function.partition(":")[0]
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or module


COMMANDS = {
    "demo": CliCommand("pipeline.stages.demo:run_demo"),
    "demo-data": CliCommand("pipeline.stages.demo:prepare_demo"),
    "smoke": CliCommand("pipeline.stages.demo:run_smoke"),
    "prepare-data": CliCommand("pipeline.stages.prepare_data:run_prepare_data", "prepare_data"),
    "challenger": CliCommand("pipeline.stages.training:run_challenger", "challenger"),
    "synthesize": CliCommand("pipeline.stages.synthesize:run_synthesize", "synthesize"),
    "solver": CliCommand("pipeline.stages.training:run_solver", "solver"),
    "merge": CliCommand("pipeline.stages.merge:run_merge", "merge"),
    "evaluate": CliCommand("pipeline.stages.evaluate:run_evaluate", "evaluate"),
    "evolve": CliCommand("pipeline.loop.evolve:run_evolve"),
    "preflight": CliCommand("pipeline.commands.preflight:run_preflight", timed=False),
    "check-services": CliCommand("pipeline.commands.check_services:run_check_services", timed=False),
    "flow-test": CliCommand(
        "pipeline.commands.flow_test:run_flow_test",
        "flow_test",
        overrides="pipeline.commands.flow_test:flow_test_overrides",
        timed=False,
    ),
    "status": CliCommand("pipeline.commands.status:run_status", "prepare_data", timed=False),
    "diagnose": CliCommand("pipeline.commands.diagnose:run_diagnose", timed=False),
    "config": CliCommand("pipeline.commands.config:run_config", timed=False),
    "list-models": CliCommand("pipeline.commands.models:run_list_models"),
    "fetch-models": CliCommand("pipeline.commands.models:run_fetch_models"),
    "serve-search": CliCommand(
        "pipeline.commands.serve_search:run_serve_search", "serve_search", timed=False
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 when it succeeded, 2 for a mistake in what was asked, 1 for a run that failed, 75 (EX_TEMPFAIL) for one
    that ended itself in time; rerunning resumes it.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    name, words = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"drzero: no command {name!r}: {hint}commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(words):
        print(command.help())
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
