"""The new model's card (README.md), and `warm_start.json`, by which `model=FOLDER` finds its settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from omegaconf import DictConfig

from drzero.ops.files import atomic_write
from drzero.ops.hub import HUB_ID
from drzero.recipe.overrides import WARM_START
from drzero.stages.warm_start_report import MEASURED
from verl_ext.artefacts import announce


def write_card(model: Path, config: DictConfig, report: Mapping[str, Any]) -> None:
    """Write both files into the model's folder."""
    about = {
        "settings_of": config.settings_of,
        "started_from": str(config.base_model),
        "terms": config.terms,
        **report,
    }
    atomic_write(model / WARM_START, json.dumps(about, indent=1, ensure_ascii=False))
    atomic_write(model / "README.md", _card(config, report))
    announce(model)


def _card(config: DictConfig, report: Mapping[str, Any]) -> str:
    base = str(config.base_model)
    hub_id = base if HUB_ID.fullmatch(base) else None
    front = ModelCardData(base_model=hub_id, tags=["dr-zero", "search-agent", "warm-start"]).to_yaml()
    counts = report["counts"]["train"]
    by_role = ", ".join(f"{sum(hops.values())} of the {role}" for role, hops in counts.items())
    teachers = "; ".join(report["teachers"])
    terms = config.terms or (
        "Nobody has stated them (`terms=`). The teacher's provider may limit what its answers may train"
    )
    lines = [
        f"---\n{front}\n---\n",
        "# A warm-started search agent\n",
        f"- Started from: `{base}`",
        f"- Learnt from: {by_role} conversations, in which the teacher was {teachers}",
        f"- Terms: {terms}.",
        f"- Trained: {config.epochs:g} epochs, learning rate {config.learning_rate:g}, "
        + (f"an adapter of rank {config.lora_rank}, merged" if config.lora_rank else "all weights"),
        "",
    ]
    if report["after"]:
        lines += ["| on held-out documents | n | before | after | 95 % |", "|---|---|---|---|---|"]
    for name, after in report["after"].items():
        before = report["before"].get(name, {}).get("share", 0.0)
        interval = f"{after['low']:.2f} to {after['high']:.2f}"
        _, words = MEASURED[name]
        lines.append(f"| {words} | {after['n']} | {before:.2f} | {after['share']:.2f} | {interval} |")
    return "\n".join([*lines, ""])
