"""The new model's card (README.md), and `warm_start.json`, by which `model=FOLDER` finds its settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from omegaconf import DictConfig

from drzero.checkpoints.reading import read_json
from drzero.ops.artefacts import announce
from drzero.ops.files import atomic_write
from drzero.ops.hub import HUB_ID
from drzero.recipe.overrides import WARM_START
from drzero.stages.models import model_name
from drzero.stages.warm_start_report import measured_rows


def write_card(model: Path, config: DictConfig, report: Mapping[str, Any]) -> None:
    """Write both files into the model's folder."""
    about = {
        "settings_of": config.settings_of,
        "started_from": str(config.base_model),
        "terms": config.terms,
        "earlier": _earlier(Path(config.base_model)),
        **report,
    }
    atomic_write(model / WARM_START, json.dumps(about, indent=1, ensure_ascii=False))
    atomic_write(model / "README.md", _card(config, about))
    announce(model)


def _earlier(base: Path) -> list[dict[str, Any]]:
    """What the base model was itself started from, the last start first: its terms still hold."""
    if not (base / WARM_START).is_file():
        return []
    about = read_json(base / WARM_START, "what the model was started from")
    last = {name: about.get(name) for name in ("started_from", "teachers", "terms")}
    return [last, *(about.get("earlier") or [])]


def _shown(model: str) -> str:
    """A hub id, or a folder with its parent's name: a warm start's own is always `model`."""
    name = model_name(model)
    return name if HUB_ID.fullmatch(name) else "/".join(Path(model).parts[-2:])


def _taught(about: Mapping[str, Any]) -> str:
    teachers = "; ".join(about["teachers"] or ["unknown"])
    terms = " ".join((about["terms"] or "").split()).rstrip(".")
    unstated = "Nobody has stated them (`terms=`). Its provider may limit what its answers may train"
    return f"the teacher was {teachers}. Terms: {terms or unstated}."


def _card(config: DictConfig, report: Mapping[str, Any]) -> str:
    earlier = report["earlier"]
    starts = [one["started_from"] for one in (report, *earlier)]
    models, first = [_shown(model) for model in starts], model_name(starts[-1])
    hub_id = first if HUB_ID.fullmatch(first) else None
    front = ModelCardData(base_model=hub_id, tags=["dr-zero", "search-agent", "warm-start"]).to_yaml()
    counts = report["counts"]["train"]
    by_role = ", ".join(f"{sum(hops.values())} of the {role}" for role, hops in counts.items())
    lines = [
        f"---\n{front}\n---\n",
        "# A warm-started search agent\n",
        f"- Started from: `{models[0]}`",
        f"- Learnt from: {by_role} conversations; {_taught(report)}",
        *(
            f"- `{model}` was itself started: {_taught(one)}"
            for model, one in zip(models, earlier, strict=False)
        ),
        f"- Trained: {config.epochs:g} epochs, learning rate {config.learning_rate:g}, "
        + (f"an adapter of rank {config.lora_rank}, merged" if config.lora_rank else "all weights"),
        "",
    ]
    if report["after"]:
        lines += ["| on held-out documents | n | before | after | 95 % |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in measured_rows(report)]
    return "\n".join([*lines, ""])
