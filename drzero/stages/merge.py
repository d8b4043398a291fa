"""The merge stage: export a run's last checkpoint as a model folder, and compare it with the start model.

    drzero merge iteration=1                                           # solver_iter1 → solver_iter1_hf
    drzero merge source=outputs/checkpoints/challenger_iter1 run.name=merge_challenger_iter1 start_model=…

docs/merge.md explains the table.
"""

import json
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from drzero.checkpoints.export import export_policy, read_check
from drzero.checkpoints.verify import ExportCheck
from drzero.checkpoints.weight_change import ChangeSize, WeightChange, measure_change
from drzero.checkpoints.weights import FsdpCheckpoint, Layout, first_difference, load_config, model_folder
from drzero.ops.files import atomic_write
from drzero.preflight.run import require
from drzero.recipe.compose import resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.result import write_result

_SIZES = ["architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"]
_SIZES += [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
]


def run_merge(config: DictConfig) -> Path:
    """Merge the last checkpoint of `config.source` into `config.run.export_dir`. Returns that folder.

    Raises CheckError before anything is written, OutOfTime, or ChildFailed if the merger fails.
    """
    require(config, "merge")
    config = resolve(config)
    folder, source = Path(config.run.dir), Path(config.source).absolute()
    checkpoint = FsdpCheckpoint(source)
    start = model_folder(config.start_model)
    check_same_model(checkpoint, start)
    export = export_policy(config, source)
    check, change = read_check(export), measure_change(checkpoint, export, start)
    report = {
        "checkpoint": str(checkpoint.folder),
        "start_model": str(config.start_model),
        "export": str(export),
        "check": asdict(check),
        "change": asdict(change),
    }
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "report.json", json.dumps(report, indent=1))
    _print_report(export, config.run.export_dtype, check, change)
    figures = {
        "changed_share": change.trained.share,
        "changed_share_exported": change.exported.share,
        "kept_by_rounding": change.kept,
        "max_log_prob_difference": check.max_log_prob_difference,
    }
    write_result(config, {"export": export}, check.tokens, figures)
    return export


def check_same_model(checkpoint: FsdpCheckpoint, start: Path) -> None:
    """Raise CheckError with the first difference between the checkpoint's model and the start model."""
    config = load_config(str(start), "start_model")
    difference = None
    for field in _SIZES:
        ours, theirs = (getattr(one, field, None) for one in (checkpoint.config, config))
        if difference is None and ours != theirs:
            difference = f"its {field} is {ours}, not {theirs}"
    # Shapes last: the layout takes long to build, and users know the sizes' names.
    difference = difference or first_difference(Layout(config).shapes, checkpoint.layout.shapes)
    if difference:
        raise CheckError(
            f"{checkpoint.huggingface / 'config.json'} is of another model than the start model {start}: "
            f"{difference}. Set source= to the run trained from it, or start_model= to the model this run "
            "started from"
        )


def _print_report(export: Path, dtype: str, check: ExportCheck, change: WeightChange) -> None:
    table = new_table(f"change of {change.weights:,} weights", "", ">changed", ">largest", ">mean")
    table.add_row("checkpoint, float32", *_cells(change.trained))
    table.add_row(f"export, {dtype}", *_cells(change.exported))
    out = console()
    out.print(table)
    if change.kept is not None:
        out.print(f"  the export keeps {change.kept:.1%} of training's step (docs/merge.md)")
    out.print(f"  every weight equals the checkpoint's, rounded ({check.weights:,} compared)")
    if check.skipped:
        out.print(f"  log-probabilities not compared: {check.skipped}")
    else:
        difference = f"{check.max_log_prob_difference:.2g}"
        out.print(f"  log-probabilities of {check.texts} texts differ by at most {difference}")
    out.print(f"  export: {export}", soft_wrap=True)


def _cells(change: ChangeSize) -> tuple[str, str, str]:
    return f"{change.share:.4%}", f"{change.max_abs:.2e}", f"{change.mean_abs:.2e}"
