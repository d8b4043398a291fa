"""Everything a stage reads, small: corpus and index, prompts and questions, model folders, exports.

Model folders named as the shipped ones have the tiny model's tokenizer and the shipped config.json's sizes,
and hold no weights: preflight loads none.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig
from safetensors.torch import save_file
from solver_rows import solver_row
from torch import zeros

from data.journal import SAMPLES, Journal
from data.parquet_io import write_training_rows
from drzero.preflight.context import Readings
from drzero.preflight.model_shape import KNOWN, ModelShape, config_of
from drzero.recipe.compose import compose_stage, resolve, write_as_run
from drzero.recipe.fingerprint import fingerprint
from verl_ext.checkpoints import TRACKER
from verl_ext.method.prompts import challenger_messages, solver_messages

ROWS = 256
MODELS = ("demo-policy", "smollm2-135m", "Qwen3-32B")
"""The shipped models that are folders."""


class World:
    """The places, and configs composed for them."""

    def __init__(self, folder: Path, corpus: Path, model: Path) -> None:
        self.root, self.model = folder, folder / "corpus" / "models" / "demo-policy"
        self.corpus, self.checkpoints = folder / "corpus", folder / "checkpoints"
        self.readings = Readings()
        """What preflight has read of these places; they do not change."""
        shutil.copytree(corpus, self.corpus)
        for name in MODELS:
            save_model_folder(self.corpus / "models" / name, model, KNOWN[name.lower()])
        rows = pq.read_table(corpus / "data" / "zero_ratio4321.parquet").to_pylist()
        for form in ("short", "full"):
            write_prompts(self.prompts(form), rows, form)
            for name in ("train", "val"):
                questions = [solver_question(index, name, form) for index in range(ROWS)]
                write_training_rows(self.questions(form, name), questions)
        for name, shape in KNOWN.items():
            save_model_folder(self.export(name), model, shape)
        self.trained = self.checkpoints / "trained"
        (self.trained / "global_step_1").mkdir(parents=True)
        (self.trained / TRACKER).write_text("1")
        self.sampled = self.checkpoints / "sampled"
        self.sampled.mkdir()
        write_as_run(resolve(self.config("synthesize", ["hardware=cpu"], "short", [])), self.sampled)
        identity = {"prompts": fingerprint(self.prompts("short")), "model": "a model"}
        with Journal(self.sampled / SAMPLES, identity):
            pass

    def prompts(self, form: str) -> Path:
        return self.corpus / "data" / f"prompts_{form}.parquet"

    def questions(self, form: str, name: str) -> Path:
        return self.checkpoints / f"questions_{form}" / f"{name}.parquet"

    def export(self, model: str) -> Path:
        return self.checkpoints / f"{model.removesuffix('-instruct')}_hf"

    def places(self, stage: str, groups: list[str], form: str) -> list[str]:
        """The overrides that lead a stage to its files."""
        is_demo = any(group in ("hardware=cpu", "compute=cpu", "env=demo") for group in groups)
        chosen = [group.partition("=")[2] for group in groups if group.startswith("model=")]
        export = self.export(chosen[0] if chosen else "demo-policy" if is_demo else "qwen2.5-3b")
        common = [
            f"paths.corpus={self.corpus}",
            f"paths.checkpoints={self.checkpoints}",
            "retrieval.embedder=packaged-minilm",
            "run.min_free_gb=0.1",
        ]
        files = {"challenger": [f"data.train_files={self.prompts(form)}"]}
        files["synthesize"] = [*files["challenger"], f"challenger={export}"]
        asked = ("evaluate", "ask", "serve_agent")
        files |= {stage: [f"solver.model_path={export}"] for stage in asked}
        files["merge"] = [f"source={self.trained}"]
        files["warm_start"] = [f"demonstrations=[{self.sampled}]"]
        files["solver"] = [f"data.{name}_files={self.questions(form, name)}" for name in ("train", "val")]
        return common + files.get(stage, [])

    def config(self, stage: str, groups: list[str], form: str, overrides: list[str]) -> DictConfig:
        """The stage's config; `overrides` in Hydra's grammar, as typed."""
        return compose_stage(stage, [*groups, *self.places(stage, groups, form), *overrides])


def save_model_folder(folder: Path, tokenizer: Path, shape: ModelShape) -> None:
    """A model folder of these sizes with another model's tokenizer and one small weight file."""
    folder.mkdir(parents=True)
    for file in tokenizer.glob("*"):
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    save_file({"nothing": zeros(1)}, folder / "model.safetensors")


def write_prompts(path: Path, rows: list[dict[str, Any]], form: str, count: int = ROWS) -> None:
    """Challenger prompts of the given rows, again and again, worded in the given form."""
    worded = []
    for index in range(count):
        row = json.loads(json.dumps(rows[index % len(rows)]))
        info = row["extra_info"]
        info["index"] = index
        row["prompt"] = challenger_messages(info["document"], info["hop"], form, 5)
        worded.append(row)
    write_training_rows(path, worded)


def solver_question(index: int, split: str, form: str) -> dict[str, Any]:
    row = solver_row(index, split, "Vell")
    return {**row, "prompt": solver_messages(row["extra_info"]["question"], form, 5)}
