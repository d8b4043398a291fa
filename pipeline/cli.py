"""The command line: `drzero STAGE OVERRIDES…`, overrides in Hydra's own grammar.

    drzero demo                                               a rehearsal on this machine
    drzero prepare-data chroma.path=my/chromadb               prompts from your corpus
    drzero challenger hardware=single_gpu model=qwen2.5-3b    the challenger stage
    drzero serve-search chroma.path=my/chromadb               the retrieval service alone

`key=value` changes a key, `+key=value` adds one, `group=option` swaps a group (model, hardware, mode).
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dotenv import load_dotenv

from ops.process import ChildError
from ops.services import ServiceGroup


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage; 0 when it succeeded, 2 for a mistake in what was asked, 1 for a run that failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    stage, overrides = arguments[0], arguments[1:]
    if stage not in STAGES:
        near = difflib.get_close_matches(stage, STAGES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"drzero: there is no stage {stage!r}: {hint}stages are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    load_dotenv(Path(".env"))  # WANDB_API_KEY, HF_TOKEN
    # A library's progress bars and advice would drown the run's own output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        STAGES[stage](overrides)
    except _expected_errors() as error:
        print(f"drzero {stage}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ChildError) else 2
    except KeyboardInterrupt:
        print(f"drzero {stage}: interrupted; rerun to resume", file=sys.stderr)
        return 130
    return 0


def _challenger(overrides: Sequence[str]) -> None:
    from pipeline.challenger import run_challenger
    from pipeline.compose import compose_stage

    run_challenger(compose_stage("challenger", overrides))


def _prepare_data(overrides: Sequence[str]) -> None:
    from pipeline.compose import compose_stage
    from pipeline.prepare_data import run_prepare_data

    run_prepare_data(compose_stage("prepare_data", overrides))


def _serve_search(overrides: Sequence[str]) -> None:
    from pipeline.checks import check_index
    from pipeline.compose import compose_stage, resolve
    from pipeline.stage_services import choose_ports, retrieval_spec

    config = compose_stage("serve_search", overrides)
    choose_ports(config)
    config = resolve(config)
    check_index(config)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with ServiceGroup([retrieval_spec(config)]) as services:
        while True:
            services.check()
            time.sleep(0.5)


def _demo(overrides: Sequence[str]) -> None:
    from pipeline.demo import run_demo

    run_demo(overrides)


def _smoke(overrides: Sequence[str]) -> None:
    from pipeline.demo import run_demo

    choices = ["run.name=smoke", "trainer.total_training_steps=1", "data.train_batch_size=4"]
    # Always from the start: a smoke test that resumes a finished run would test nothing.
    run_demo([*choices, "trainer.resume_mode=disable", "trainer.save_freq=1", *overrides])


# Stages are imported when they run: `drzero help` must not load torch.
STAGES: dict[str, Callable[[Sequence[str]], None]] = {
    "demo": _demo,
    "smoke": _smoke,
    "prepare-data": _prepare_data,
    "challenger": _challenger,
    "serve-search": _serve_search,
}


def _expected_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is written for the user; any other is a bug and keeps its traceback."""
    from omegaconf.errors import OmegaConfBaseException

    from data.errors import DataError
    from ops.ports import PortTaken
    from pipeline.checks import CheckError
    from pipeline.overrides import OverrideError
    from search.corpus import CorpusError
    from search.embedders import EmbedderError
    from search.store import StoreError

    return (
        *(ChildError, PortTaken, StoreError, CorpusError, EmbedderError, CheckError, OverrideError),
        *(OmegaConfBaseException, FileNotFoundError, DataError),
    )


if __name__ == "__main__":
    sys.exit(main())
