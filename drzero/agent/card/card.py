"""The model card of a bundle: README.md with the hub's front matter, and figures that runs recorded.

Names come from models, documents and people. In the card they are text: no markup, no HTML.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import DictConfig

from drzero.agent.bundle.manifest import Manifest
from drzero.agent.card.figures import questions_made, scores, trained_with
from drzero.ops.files import atomic_write
from drzero.ops.hub import HUB_ID
from drzero.recipe.fingerprint import fingerprint_model
from drzero.runs.report.text import visible

_MARKUP = re.compile(r"([\\`*_\[\](){}#|~$!^@:])")
_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.\-]*")  # as the hub writes them


def as_text(value: Any) -> Any:
    """A value as it may stand in Markdown: a text in one line without effect."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "–" if value is None else value
    return _MARKUP.sub(r"\\\1", _line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _line(text: str) -> str:
    return " ".join(visible(text).split())


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=False,
    finalize=as_text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["digits"] = lambda value: None if value is None else f"{value:.3f}"


def write_card(path: Path, config: DictConfig, manifest: Manifest, model: Path) -> None:
    """Write the card of a model folder. Raises CheckError for a damaged report."""
    checkpoints = Path(config.paths.checkpoints)
    evaluated = list(scores(checkpoints, manifest.iteration, fingerprint_model(str(model))))
    body = _TEMPLATES.get_template("card.md.jinja").render(
        manifest=manifest,
        name=Markup(config.push or "FOLDER"),
        scores=evaluated,
        is_evaluated=any(one.model == "this model" for one in evaluated),
        made=list(questions_made(checkpoints, manifest.iteration)),
        licence=config.licence,
        corpus_licence=config.corpus_licence,
        trained_with=trained_with(checkpoints, manifest.iteration),
        versions=", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    )
    atomic_write(path, f"---\n{front_matter(config, manifest.base_model)}\n---\n\n{body}")


def front_matter(config: DictConfig, base_model: str) -> str:
    """The fields for the hub: licence, base model and data sets, as far as somebody stated them."""
    licence = None if config.licence is None else _line(config.licence)
    is_known = licence is None or _LICENCE_ID.fullmatch(licence)
    return ModelCardData(
        license=licence if is_known else "other",
        license_name=None if is_known else licence,
        base_model=base_model if HUB_ID.fullmatch(base_model) else None,
        datasets=list(map(_line, config.datasets)) or None,
        tags=["dr-zero", "search-agent", "question-answering"],
    ).to_yaml()
