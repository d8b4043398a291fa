"""The command line of `modal run modal_train.py`: flags, and any number of Hydra overrides.

    modal run modal_train.py --action challenger --iteration 2 trainer.save_freq=5 +trainer.foo=1

Modal's own parser takes no free words. Parsed at import: a mistyped flag is reported before an image build.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from drzero.launch.actions import ACTIONS, find_action
from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean

FUNCTIONS = {"train": "", "evaluate": "evaluate", "train_with_config": ""}
"""Entry points besides `main`, and their actions without `--stage`. Empty: the environment decides."""
SERVE_GPUS = "machine.serve_gpus"
_NAME_A_RUN = ("logs", "stacks", "diagnose")
_TAKES_PLACES = ("upload", "download", "agent-bench", *_NAME_A_RUN)
_RUNS = (*(name for name, action in ACTIONS.items() if action.is_job), "preflight")
_RUNS_BY_NAME = (*_RUNS, *_NAME_A_RUN)
_TRAINS = (*(name for name, action in ACTIONS.items() if action.trains), "preflight")
_ITERATES = ("challenger", "synthesize", "solver", "merge", "evaluate", "preflight", "check-services")
_CHECKS = ("preflight", "check-services", "flow-test")
_QUOTED = r"'[^']*'|\"[^\"]*\""
_OVERRIDE = rf"(?:{_QUOTED}|\[(?:{_QUOTED}|[^\[\]])*\]|\{{(?:{_QUOTED}|[^{{}}])*\}}|[^\s'\"\[\]{{}}])+"


def _flag(taken_by: Sequence[str], meaning: str, least: int | None = None) -> Any:
    """A flag for the actions that read it. Another would ignore it. `least` makes it a number."""
    kind = {} if least is None else {"type": int}
    return field(default=None, metadata={"taken_by": taken_by, "help": meaning, "least": least, "kind": kind})


def _switch(action: str, meaning: str) -> Any:
    told = {"taken_by": (action,), "help": f"with {action}: {meaning}", "kind": {"action": "store_true"}}
    return field(default=False, metadata=told)


@dataclass
class Words:
    """The parsed command line. None stands for a flag that was left out."""

    action: str  # empty for `::train` without `--stage`: the environment decides
    function: str = "main"
    overrides: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Other free words: paths to upload or download, a stage, a run."""
    model: str | None = _flag(
        _RUNS_BY_NAME,
        "an option of config/model/, or a hub id; evaluate scores it unless --iteration is given",
    )
    env: str | None = _flag(
        _RUNS_BY_NAME,
        "own or demo, which are searched; or wordle, bfcl-single-turn, verifiers:NAME, one of your own",
    )
    stage: str | None = _flag((*_CHECKS, *_NAME_A_RUN), f"of {', '.join((*_NAME_A_RUN, *_CHECKS))}")
    hop_ratio: str | None = _flag(_RUNS, "like 4:3:2:1")
    config_path: str | None = _flag((*_RUNS, "list-models"), "a run file, as in config/runs/")
    gpu_type: str | None = _flag(
        _RUNS, "like H100; one, unless --gpu-count says more. Without both: 8 x H100"
    )
    trainer_gpu_ids: str | None = _flag(
        _TRAINS, "like 0,1,2,3: the GPUs that only train, with --inference-gpu-ids"
    )
    inference_gpu_ids: str | None = _flag(_TRAINS, "like 4,5,6,7: the GPUs that only sample")
    provoke: str | None = _flag(("flow-test",), "with flow-test: a fault")
    iteration: int | None = _flag((*_ITERATES, *_NAME_A_RUN), "of the loop; 0 is the base model", 0)
    steps: int | None = _flag(_TRAINS, "training steps (of an iteration)", 1)
    gpu_count: int | None = _flag(_RUNS, "0 for none", 0)
    serve_gpus: int | None = _flag(_TRAINS, "GPUs that only sample, while the others train", 1)
    num_examples: int | None = _flag(_RUNS, "questions of each benchmark, or rows of the environment", 1)
    seconds: int | None = _flag(("flow-test",), "with flow-test: how long", 1)
    workers: bool = _switch("flow-test", "in separate workers")
    follow: bool = _switch("logs", "until the run's end")
    open: bool = _switch("serve-model", "without a token: whoever has the address can ask")
    with_trainer: bool = _switch("check-services", "through the stage's own trainer")


_FLAGS = {each.name.replace("_", "-"): each for each in fields(Words) if each.metadata}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith("required: --action"):
            message = f"an action is required: --action {', --action '.join(ACTIONS)}"
        raise LaunchError(message)


def parse(words: Sequence[str], function: str = "main") -> Words:
    """Parse the words after `modal_train.py`. `--help` exits. Raises LaunchError for any mistake in them."""
    parser = _build(function)
    values, rest = parser.parse_known_args(list(words))
    for word in rest:
        if word.startswith("-"):
            flags = [flag for action in parser._actions for flag in action.option_strings]
            name = word.partition("=")[0]
            raise LaunchError(f"{name}: no such flag{did_you_mean(name, flags)}. Flags: {', '.join(flags)}")
    overrides = [word for word in rest if "=" in word or word.startswith("~")]
    places = [word for word in rest if word not in overrides]
    if function != "main":
        values.action = values.stage or FUNCTIONS[function]
        values.stage = None
        overrides = [*split_overrides(vars(values).pop("overrides")), *overrides]
        if values.action not in ("", "evaluate") and not find_action(values.action).trains:
            other = f"use train, challenger, solver or evolve, or --action {values.action}"
            raise LaunchError(f"--stage {values.action}: {other}")
    return with_split(_checked(Words(**vars(values), function=function, overrides=overrides, places=places)))


def parse_modal_run(argv: Sequence[str], file: str) -> Words | None:
    """The words of `modal run FILE`, None for other programs. Modal itself would parse them after a build."""
    function, words = _called(argv, file)
    if function in ("main", *FUNCTIONS):
        return parse(words, function)
    if function:
        near = did_you_mean(function, FUNCTIONS)
        raise LaunchError(f"::{function}: no such entry point{near}. There are {', '.join(FUNCTIONS)}")
    return None


def with_split(words: Words) -> Words:
    """Write the flags for GPUs that only sample as an override. Ids count the machine's GPUs, from 0."""
    ids = {flag: _ids(flag, getattr(words, flag)) for flag in ("trainer_gpu_ids", "inference_gpu_ids")}
    training, serving = ids.values()
    if training is None and serving is None:
        split: int | list[int] | None = words.serve_gpus
    elif words.serve_gpus is not None or training is None or serving is None:
        raise LaunchError("--trainer-gpu-ids and --inference-gpu-ids go together, or --serve-gpus alone")
    else:
        both = sorted([*training, *serving])
        count = len(both) if words.gpu_count is None else words.gpu_count
        if both != list(range(count)):
            raise LaunchError(
                f"--trainer-gpu-ids {words.trainer_gpu_ids} --inference-gpu-ids {words.inference_gpu_ids}: "
                f"name each GPU of the machine once, 0 to {count - 1}; --gpu-count says how many it has"
            )
        words.gpu_count, split = count, serving
    if split is not None:
        words.overrides.append(f"{SERVE_GPUS}={split}".replace(" ", ""))
    return words


def _ids(flag: str, text: str | None) -> list[int] | None:
    parts = None if text is None else text.split(",")
    if parts is not None and not all(part.strip().isdecimal() for part in parts):
        raise LaunchError(f"--{flag.replace('_', '-')} {text}: write numbers, like 0,1,2,3")
    return None if parts is None else [int(part) for part in parts]


def split_overrides(text: str) -> list[str]:
    """Split at spaces outside quotes and brackets (`+a.b='x y'`). Raises LaunchError for an unclosed one."""
    words = re.findall(_OVERRIDE, text)
    if re.sub(r"\s", "", "".join(words)) != re.sub(r"\s", "", text):
        raise LaunchError(f"--overrides {text}: a quote or bracket is not closed")
    # Quotes around a whole override belong to the shell, those inside to Hydra.
    return [word[1:-1] if word[0] in "'\"" and word[0] == word[-1] else word for word in words]


def _called(argv: Sequence[str], file: str) -> tuple[str, list[str]]:
    for position, word in enumerate(argv):
        name, _, function = word.partition("::")
        if name.endswith(file) and "run" in argv[:position]:
            return function or "main", list(argv[position + 1 :])
    return "", []


def _build(function: str) -> _Parser:
    width = max(map(len, ACTIONS)) + 2
    actions = "".join(f"\n  {action.name:<{width}}{action.help}" for action in ACTIONS.values())
    parser = _Parser(
        prog="modal run modal_train.py" + ("" if function == "main" else f"::{function}"),
        usage=f"%(prog)s {'--action ACTION ' * (function == 'main')}[flags] [KEY=VALUE …]",
        description=f"actions:{actions}",
        epilog="KEY=VALUE is a Hydra override for the stage. docs/modal.md explains it all.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if function == "main":
        parser.add_argument("--action", required=True)
    else:
        parser.add_argument("--overrides", default="", help="several KEY=VALUE in one text")
    for flag, each in _FLAGS.items():
        parser.add_argument(f"--{flag}", help=each.metadata["help"], **each.metadata["kind"])
    return parser


def _checked(words: Words) -> Words:
    # `::train` without --stage trains.
    action = find_action(words.action or "train")
    for flag, each in _FLAGS.items():
        value, actions = getattr(words, each.name), each.metadata["taken_by"]
        if value is None or value is False:
            continue
        if action.name not in actions:
            hint = f": use --action {words.stage}" if flag == "stage" else ""
            raise LaunchError(
                f"--{flag}: {action.name} does not read it{hint}. It is for {', '.join(actions)}"
            )
        least = each.metadata.get("least")
        if least is not None and value < least:
            raise LaunchError(f"--{flag} {value}: must be {least} or more")
    if words.places and not action.of_stage and action.name not in _TAKES_PLACES:
        raise LaunchError(
            f"{words.places[0]!r}: {action.name} takes only flags and overrides (key=value)"
            f"{did_you_mean(words.places[0], ACTIONS)}"
        )
    return words
