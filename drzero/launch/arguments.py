"""The command line of `modal run modal_train.py`: flags, and any number of Hydra overrides.

    modal run modal_train.py --action challenger --iteration 2 trainer.save_freq=5 +trainer.foo=1

Modal's own parser takes no free words. Parsed at import: a mistyped flag is reported before an image build.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from drzero.launch.actions import ACTIONS, find_action
from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean

FUNCTIONS = {"train": "", "evaluate": "evaluate", "train_with_config": ""}
"""Entry points besides `main`, and their actions without `--stage`. Empty: the environment decides."""
_TEXT_FLAGS = {
    "model": "an option of config/model/, or a hub id; evaluate scores it unless --iteration is given",
    "env": "own or demo, which are searched; or wordle, bfcl-single-turn, verifiers:NAME, one of your own",
    "stage": "of logs, stacks, diagnose, preflight, check-services and flow-test",
    "hop-ratio": "like 4:3:2:1",
    "config-path": "a run file, as in config/runs/",
    "gpu-type": "like H100; one, unless --gpu-count says more. Without both: 8 x H100",
    "trainer-gpu-ids": "like 0,1,2,3: the GPUs that only train, with --inference-gpu-ids",
    "inference-gpu-ids": "like 4,5,6,7: the GPUs that only sample",
    "provoke": "with flow-test: a fault",
}
_NUMBER_FLAGS = {
    "iteration": (0, "of the loop; 0 is the base model"),
    "steps": (1, "training steps (of an iteration)"),
    "gpu-count": (0, "0 for none"),
    "serve-gpus": (1, "GPUs that only sample, while the others train"),
    "num-examples": (1, "questions of each benchmark, or rows of the environment"),
    "seconds": (1, "with flow-test: how long"),
}
"""The least value of each, and its help."""
SERVE_GPUS = "machine.serve_gpus"
_NAME_A_RUN = ("logs", "stacks", "diagnose")
_TAKES_PLACES = ("upload", "download", *_NAME_A_RUN)
_RUNS = (*(name for name, action in ACTIONS.items() if action.is_job), "preflight")
_TRAINS = tuple(name for name, action in ACTIONS.items() if action.trains)
_ITERATES = ("challenger", "synthesize", "solver", "merge", "evaluate", "preflight", "check-services")
_TAKEN_BY = {
    "stage": ("preflight", "check-services", "flow-test", *_NAME_A_RUN),
    "iteration": (*_ITERATES, *_NAME_A_RUN),
    **dict.fromkeys(("env", "model"), (*_RUNS, *_NAME_A_RUN)),
    **dict.fromkeys(("gpu-type", "gpu-count", "steps", "hop-ratio", "num-examples"), _RUNS),
    **dict.fromkeys(("serve-gpus", "trainer-gpu-ids", "inference-gpu-ids"), (*_TRAINS, "preflight")),
    "config-path": (*_RUNS, "list-models"),
    **dict.fromkeys(("seconds", "provoke", "workers"), ("flow-test",)),
}
"""The actions that read a flag. Another would ignore it."""
_QUOTED = r"'[^']*'|\"[^\"]*\""
_OVERRIDE = rf"(?:{_QUOTED}|\[(?:{_QUOTED}|[^\[\]])*\]|\{{(?:{_QUOTED}|[^{{}}])*\}}|[^\s'\"\[\]{{}}])+"


@dataclass
class Words:
    """The parsed command line. None stands for a flag that was left out."""

    action: str  # empty for `::train` without `--stage`: the environment decides
    function: str = "main"
    iteration: int | None = None
    model: str | None = None
    env: str | None = None
    steps: int | None = None
    hop_ratio: str | None = None
    config_path: str | None = None
    gpu_type: str | None = None
    gpu_count: int | None = None
    serve_gpus: int | None = None
    trainer_gpu_ids: str | None = None
    inference_gpu_ids: str | None = None
    stage: str | None = None
    num_examples: int | None = None
    seconds: int | None = None
    provoke: str | None = None
    workers: bool = False
    follow: bool = False
    with_trainer: bool = False
    overrides: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Other free words: paths to upload or download, a stage, a run."""


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
    for flag, meaning in _TEXT_FLAGS.items():
        parser.add_argument(f"--{flag}", help=meaning)
    for flag, (_, meaning) in _NUMBER_FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, help=meaning)
    parser.add_argument("--workers", action="store_true", help="with flow-test: in separate workers")
    parser.add_argument("--follow", action="store_true", help="with logs: until the run's end")
    parser.add_argument(
        "--with-trainer", action="store_true", help="with check-services: through the stage's own trainer"
    )
    return parser


def _checked(words: Words) -> Words:
    # `::train` without --stage trains.
    action = find_action(words.action or "train")
    for flag, actions in _TAKEN_BY.items():
        if getattr(words, flag.replace("-", "_")) not in (None, False) and action.name not in actions:
            hint = f": use --action {words.stage}" if flag == "stage" else ""
            raise LaunchError(
                f"--{flag}: {action.name} does not read it{hint}. It is for {', '.join(actions)}"
            )
    if words.steps is not None and not action.trains and action.name != "preflight":
        raise LaunchError(f"--steps: {action.name} does not train; leave it out")
    if words.follow and action.name != "logs":
        raise LaunchError(f"--follow is for --action logs; {action.name} prints its output as it runs")
    if words.with_trainer and action.name != "check-services":
        raise LaunchError(f"--with-trainer is for --action check-services, not {action.name}")
    for flag, (least, _) in _NUMBER_FLAGS.items():
        value = getattr(words, flag.replace("-", "_"))
        if value is not None and value < least:
            raise LaunchError(f"--{flag} {value}: must be {least} or more")
    if words.places and not action.of_stage and action.name not in _TAKES_PLACES:
        raise LaunchError(
            f"{words.places[0]!r}: {action.name} takes only flags and overrides (key=value)"
            f"{did_you_mean(words.places[0], ACTIONS)}"
        )
    return words
