"""The command line: `drzero STAGE OVERRIDES…`, overrides in Hydra's own grammar.

    drzero demo                                               a rehearsal on this machine
    drzero demo-data                                          its corpus, prompts and models alone
    drzero prepare-data chroma.path=my/chromadb               prompts from your corpus
    drzero evolve hardware=8xh100 model=qwen2.5-3b            the whole loop, resumable; its stages alone:
      drzero challenger | synthesize | solver | merge | evaluate  iteration=1 …
    drzero preflight STAGE OVERRIDES… [--json]                what would go wrong, before anything is paid for
    drzero check-services STAGE OVERRIDES…                    one question through its services, hop by hop
    drzero flow-test --seconds 30                             veRL's queues and buffer, without a model
    drzero status                                             how far the loop is
    drzero diagnose outputs/checkpoints/challenger_iter1      why a run ended or stands still
    drzero list-models                                        what model= names, and what is here of it
    drzero fetch-models challenger model=qwen2.5-3b           what a stage wants of the hub, into the cache
    drzero serve-search chroma.path=my/chromadb               the retrieval service alone

`key=value` changes a key, `+key=value` adds one, `group=option` swaps a group (model, hardware, mode,
compute). With DRZERO_STOP_AT (Unix seconds) set, a stage ends itself in time, with exit code 75; the same
command goes on from there (docs/stopping.md).
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from dotenv import load_dotenv

from ops.services import ServiceGroup
from pipeline.out_of_time import OutOfTime, require_time

# The disk is full, over quota or read-only: no bug, and nothing that a traceback would explain.
_STORAGE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage and return the exit code.

    0 when it succeeded, 2 for a mistake in what was asked, 1 for a run that failed, 75 (EX_TEMPFAIL) for one
    that ended itself in time and goes on when run again.
    """
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
        if stage not in _UNTIMED:
            require_time(stage)
        code = STAGES[stage](overrides)
    except OutOfTime as error:
        print(f"drzero {stage}: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL
    except _loaded(_EXPECTED) as error:
        print(f"drzero {stage}: {error}", file=sys.stderr)
        return 1 if isinstance(error, _loaded(_FAILED_RUNS)) else 2
    except OSError as error:
        if error.errno not in _STORAGE_FAULTS:
            raise
        print(
            f"drzero {stage}: {error.filename or 'a file of the run'} cannot be written: {error.strerror}. "
            "Make room or choose another place (paths.checkpoints=…), then rerun to resume",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"drzero {stage}: interrupted; rerun to resume", file=sys.stderr)
        return 130
    return code or 0


def _configured(stage: str) -> Callable[[Sequence[str]], None]:
    """`pipeline.{stage}.run_{stage}`, imported after its config is composed: a mistake is told at once."""

    def run(overrides: Sequence[str]) -> None:
        from pipeline.compose import compose_stage

        config = compose_stage(stage, overrides)
        getattr(import_module(f"pipeline.{stage}"), f"run_{stage}")(config)

    return run


def _prepare_data(overrides: Sequence[str]) -> None:
    from pipeline.compose import compose_stage
    from pipeline.preflight import require
    from pipeline.prepare_data import run_prepare_data

    config = compose_stage("prepare_data", overrides)
    require(config, "prepare_data")
    run_prepare_data(config)


def _evolve(arguments: Sequence[str]) -> None:
    from pipeline.evolve import run_evolve

    run_evolve(arguments)


def _preflight(arguments: Sequence[str]) -> int:
    from pipeline.finding import refusal
    from pipeline.preflight import STAGES as JUDGED
    from pipeline.preflight import preflight_stage
    from pipeline.preflight_report import as_json, print_reports

    words = [word for word in arguments if word != "--json"]
    stages = [*(stage.replace("_", "-") for stage in JUDGED), "evolve"]
    if not words or words[0] not in stages:
        raise refusal(
            "stage", words[0] if words else "", "preflight judges one stage", f"say {', '.join(stages)}"
        )
    reports = preflight_stage(words[0], words[1:])
    if "--json" in arguments:
        print(as_json(reports))
    else:
        print_reports(reports)
    return 2 if any(report.errors for report in reports) else 0


def _check_services(arguments: Sequence[str]) -> None:
    from pipeline.check_services import run_check_services, split_stage
    from pipeline.compose import compose_stage

    stage, overrides = split_stage(arguments)
    # A folder of its own: the stage's may be in use.
    run_check_services(compose_stage(stage, ["run.name=check_services", *overrides]), stage)


def _flow_test(arguments: Sequence[str]) -> None:
    from pipeline.compose import compose_stage
    from pipeline.flow_test import flow_test_overrides, run_flow_test

    run_flow_test(compose_stage("flow_test", flow_test_overrides(arguments)))


def _status(overrides: Sequence[str]) -> None:
    from pipeline.compose import compose_stage
    from pipeline.loop_report import run_status

    run_status(compose_stage("prepare_data", overrides))


def _diagnose(arguments: Sequence[str]) -> None:
    from pipeline.diagnose import run_diagnose

    run_diagnose(arguments)


def _list_models(overrides: Sequence[str]) -> None:
    from pipeline.list_models import run_list_models

    run_list_models(overrides)


def _fetch_models(overrides: Sequence[str]) -> None:
    from pipeline.fetch_models import run_fetch_models

    run_fetch_models(overrides)


def _serve_search(overrides: Sequence[str]) -> None:
    from pipeline.compose import compose_stage, resolve
    from pipeline.preflight import require
    from pipeline.stage_services import choose_ports, retrieval_spec

    config = compose_stage("serve_search", overrides)
    require(config, "serve_search")
    choose_ports(config)
    config = resolve(config)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with ServiceGroup([retrieval_spec(config)]) as services:
        while True:
            services.check()
            time.sleep(0.5)


def _demo(overrides: Sequence[str]) -> None:
    from pipeline.demo import run_demo

    run_demo(overrides)


def _demo_data(overrides: Sequence[str]) -> None:
    from pipeline.demo import prepare_demo

    prepare_demo(overrides)


def _smoke(overrides: Sequence[str]) -> None:
    from pipeline.demo import run_demo

    choices = ["run.name=smoke", "trainer.total_training_steps=1", "data.train_batch_size=4"]
    # Always from the start: a smoke test that resumes a finished run would test nothing.
    run_demo([*choices, "trainer.resume_mode=disable", "trainer.save_freq=1", *overrides])


# Stages are imported when they run: `drzero help` must not load torch.
STAGES: dict[str, Callable[[Sequence[str]], int | None]] = {
    "demo": _demo,
    "demo-data": _demo_data,
    "smoke": _smoke,
    "prepare-data": _prepare_data,
    "challenger": _configured("challenger"),
    "synthesize": _configured("synthesize"),
    "solver": _configured("solver"),
    "merge": _configured("merge"),
    "evaluate": _configured("evaluate"),
    "evolve": _evolve,
    "preflight": _preflight,
    "check-services": _check_services,
    "flow-test": _flow_test,
    "status": _status,
    "diagnose": _diagnose,
    "list-models": _list_models,
    "fetch-models": _fetch_models,
    "serve-search": _serve_search,
}


_UNTIMED = {"preflight", "check-services", "flow-test", "status", "diagnose", "serve-search"}
"""They only look, or last until somebody ends them."""


# Errors of a run that was asked for rightly.
_FAILED_RUNS = (
    "ops.process:ChildError",
    "pipeline.check_services:HopFailed",
    "pipeline.flow_test:FlowFailed",
    "pipeline.served_model:ConversationsFailed",
)
# Errors whose message is written for the user; any other is a bug and keeps its traceback.
_EXPECTED = (
    *_FAILED_RUNS,
    "builtins:FileNotFoundError",
    "data.errors:DataError",
    "omegaconf.errors:OmegaConfBaseException",
    "ops.lock:AlreadyRunning",
    "ops.ports:PortTaken",
    "pipeline.diagnose:NotARun",
    "pipeline.finding:CheckError",
    "pipeline.manifest:LoopChanged",
    "pipeline.overrides:OverrideError",
    "search.corpus:CorpusError",
    "search.embedders:EmbedderError",
    "search.store:StoreError",
    "verl_ext.method.search_agent:SolverServerError",
    "verl_ext.stop_time:BadStopTime",
)


def _loaded(names: Sequence[str]) -> tuple[type[Exception], ...]:
    """The classes `module:Class` whose modules are imported: no other can have been raised.

    To import them all for the sake of one message would take five seconds.
    """
    found = (name.partition(":") for name in names)
    return tuple(getattr(sys.modules[module], error) for module, _, error in found if module in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
