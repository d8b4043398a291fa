"""The warm start: a small model learns the format and the searching from conversations that passed the gates.

    drzero warm-start from=outputs/checkpoints/preview model=smollm2-135m hardware=cpu learning_rate=1e-3
    drzero warm-start source=papers.jsonl endpoint=https://api.example.com/v1 endpoint_model=a-model rows=400
    drzero evolve model=outputs/checkpoints/warm_start/model        # it is a model like any other

Demonstrations come from runs of preview or synthesize; with `endpoint=`, a preview is made first. The same
gates judge them, a right attempt confirms them, and what the evaluation asks stays out (gates.benchmarks=).
veRL's supervised trainer learns them, on a laptop as on GPUs. Before and after, the model asks and answers
on documents it has not seen. A rerun after a kill resumes.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from drzero.checkpoints.export import export_policy
from drzero.ops.artefacts import announce
from drzero.ops.console import say
from drzero.ops.files import remove_temporaries, write_jsonl
from drzero.ops.process.lock import HeldLock
from drzero.preflight.demonstrations import Source, read_source, searching_as
from drzero.preflight.inputs import gate_questions
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.compose import write_resolved
from drzero.recipe.tables import console, new_table
from drzero.stages.models import costs
from drzero.stages.preview import run_preview
from drzero.stages.result import DEMONSTRATIONS, LEFT_OUT, RESULT, write_report, write_result
from drzero.stages.services import check_and_resolve
from drzero.stages.synthesize import gates_of
from drzero.stages.warm_start.card import write_card
from drzero.stages.warm_start.check import play_check
from drzero.stages.warm_start.choose import Chosen, choose
from drzero.stages.warm_start.training import check_same, losses, train
from drzero.stages.warm_start_report import measured_rows, shares

PREVIEW = "preview"  # where a preview for this run alone goes


def run_warm_start(config: DictConfig) -> None:
    """Choose the demonstrations, train on them, check the model, and write it with its card.

    Raises PreflightFailed, CheckError, DataError with too few demonstrations, OutOfTime, ServiceDied,
    Stalled, ChildFailed or ConversationsFailed.
    """
    config = check_and_resolve(config, "warm_start")
    folder = Path(config.run.dir)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        sources = _sources(config)
        as_first = searching_as(config, sources[0])
        tokenizer = load_chat_tokenizer(str(config.base_model), "base_model")
        chosen = choose(config, sources, tokenizer, gates_of(as_first, gate_questions(config)))
        # Before anything of an earlier training is overwritten.
        check_same(config, chosen)
        (folder / RESULT).unlink(missing_ok=True)
        write_resolved(as_first)
        _write_chosen(config, chosen)
        before = _check(config, str(config.base_model), "before", chosen)
        model = export_policy(config, train(config, chosen))
        after = _check(config, str(model), "after", chosen)
        write_resolved(as_first)  # the checks have written theirs
        report = {
            "counts": chosen.counts(),
            "left_out": dict(Counter(_gate(one.reason) for one in chosen.left_out).most_common()),
            "losses": losses(folder),
            "before": shares(before),
            "after": shares(after),
            "teachers": sorted({source.teacher for source in sources}),
        }
        write_card(model, config, report)
        _finish(config, report, model, costs([*before, *after]))


def _sources(config: DictConfig) -> list[Source]:
    if config.demonstrations:
        return [read_source(Path(folder)) for folder in config.demonstrations]
    own = {"run": {"name": PREVIEW, "dir": f"{config.run.dir}/{PREVIEW}"}}
    preview = OmegaConf.merge(config, own, {"prompts": {"form": "full"}})  # of a teacher that knows no other
    assert isinstance(preview, DictConfig)
    preview.out_dir = f"{preview.run.dir}/prompts"
    run_preview(preview)
    return [read_source(Path(preview.run.dir))]


def _write_chosen(config: DictConfig, chosen: Chosen) -> None:
    folder = Path(config.run.dir)
    write_jsonl(folder / DEMONSTRATIONS, (one.to_dict() for one in chosen.demonstrations))
    write_jsonl(folder / LEFT_OUT, map(vars, chosen.left_out))
    _print_chosen(config.run.name, chosen)
    for name in (DEMONSTRATIONS, LEFT_OUT):
        announce(folder / name)
    if (found := len(chosen.of("train"))) < config.least:
        raise DataError(
            f"{found} demonstrations are left to train on, and least={config.least} are required: see "
            f"{folder / LEFT_OUT} for the reasons, then name more runs (from=), or ask for more (rows=)"
        )


def _check(config: DictConfig, model: str, when: str, chosen: Chosen) -> list[dict[str, Any]]:
    if not config.check:
        return []
    if not chosen.held_out_pairs:
        say("check", f"{when}: nothing to ask, because no pair is held out (held_out_share=)", "warning")
        return []
    return play_check(config, model, when, chosen.held_out_pairs)


def _gate(reason: str) -> str:
    """A reason's kind: the text before its colon, of the first gate."""
    return reason.partition(":")[0]


def _print_chosen(name: str, chosen: Chosen) -> None:
    table = new_table(f"{name}: demonstrations", "split", "role", ">1 hop", ">2 hops", ">3 hops", ">more")
    for split, roles in chosen.counts().items():
        for role, by_hop in roles.items():
            few = [by_hop.get(str(hop), 0) for hop in (1, 2, 3)]
            table.add_row(split, role, *map(str, few), str(sum(by_hop.values()) - sum(few)))
    left_out = new_table("left out", "reason", ">conversations")
    for reason, times in Counter(_gate(one.reason) for one in chosen.left_out).most_common():
        left_out.add_row(reason, str(times))
    console().print(table, left_out)


def _finish(config: DictConfig, report: Mapping[str, Any], model: Path, cost: Mapping[str, Any]) -> None:
    folder = Path(config.run.dir)
    write_report(folder, report)
    _print_report(config.run.name, report, model)
    figures = {"demonstrations": sum(sum(hops.values()) for hops in report["counts"]["train"].values())}
    figures |= {f"{name}_after": share["share"] for name, share in report["after"].items()}
    tokens = cost["tokens_in"] + cost["tokens_out"]
    outputs = {"model": model, "demonstrations": folder / DEMONSTRATIONS, "left_out": folder / LEFT_OUT}
    write_result(config, outputs, tokens, figures)


def _print_report(name: str, report: Mapping[str, Any], model: Path) -> None:
    out, rows = console(), measured_rows(report)
    table = new_table(f"{name}: held-out documents", "", ">n", ">before", ">after", ">95 % after")
    for row in rows:
        table.add_row(*row)
    if rows:
        out.print(table)
    lost = {key: "–" if value is None else f"{value:.3f}" for key, value in report["losses"].items()}
    out.print(
        f"loss: training {lost['first_train']} to {lost['last_train']}, "
        f"held out {lost['first_held_out']} to {lost['last_held_out']}"
    )
    out.print(f"the model: {model} (use it with model={model})", soft_wrap=True)
