"""The runs that a warm start learns from: read once, checked before anything is asked or trained."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from data.hop_ratio import prompts_file
from data.journal import SAMPLES, read_records
from data.parquet_io import read_parquet
from drzero.ops.errors import UserError
from drzero.ops.records import parse_line
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note
from drzero.recipe.compose import RESOLVED
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint, fingerprint_index


@dataclass(frozen=True)
class Source:
    """A run of preview or synthesize, with its prompts, its conversations, and what it was made with."""

    name: str
    teacher: str
    settings: Mapping[str, Any]  # its config as it ran
    rows: list[dict[str, Any]]
    records: list[dict[str, Any]]


def read_source(folder: Path) -> Source:
    """Read a finished or unfinished run. Raises CheckError if it is none, or its prompts have changed."""
    folder = folder.expanduser().absolute()
    resolved, journal = folder / f"{RESOLVED}.yaml", folder / SAMPLES
    if not resolved.is_file() or not journal.is_file():
        raise CheckError(
            f"from={folder}: no run of preview or synthesize is there ({SAMPLES}, {RESOLVED}.yaml)"
        )
    try:
        settings = yaml.safe_load(resolved.read_text(encoding="utf-8"))
        settings = _moved(settings, str(settings["run"]["dir"]), str(folder))
        identity = _identity(journal)
        teacher, prompts = _teacher(settings, identity), _prompts(settings)
        known = identity["prompts"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as reason:
        raise CheckError(
            f"from={folder}: its {RESOLVED}.yaml or the first line of its {SAMPLES} is damaged, or of an "
            f"older version ({' '.join(str(reason).split())}): run it again"
        ) from reason
    if not prompts.is_file() or fingerprint(prompts) != known:
        raise CheckError(
            f"from={folder}: its prompts, {prompts}, are missing or have changed since: run it again"
        )
    records = read_records(journal)
    asked = {record["prompt_index"] for record in records}
    table = read_parquet(prompts, ["extra_info"])
    rows = [row for row in table.to_pylist() if row["extra_info"]["index"] in asked]
    return Source(str(folder), teacher, settings, rows, records)


def _moved(value: Any, was: str, now: str) -> Any:
    """Settings whose paths below the run's folder are where that folder is now."""
    if isinstance(value, dict):
        return {name: _moved(inner, was, now) for name, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, was, now) for inner in value]
    is_inside = isinstance(value, str) and (value == was or value.startswith(f"{was}/"))
    return now + value[len(was) :] if is_inside else value


def _identity(journal: Path) -> Mapping[str, Any]:
    with journal.open("rb") as file:
        first = parse_line(file.readline())
    if first is None:
        raise KeyError("identity")
    return dict(first["identity"])


def _teacher(settings: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    if settings.get("endpoint"):
        return str(identity["model"]).removeprefix("served as ")
    return str(settings.get("challenger") or settings["solver"]["model_path"])


def _prompts(settings: Mapping[str, Any]) -> Path:
    if "out_dir" in settings:  # a preview
        return Path(settings["out_dir"]) / prompts_file(settings["hop_ratio"])
    return Path(settings["data"]["train_files"])


def searching_as(config: DictConfig, source: Source) -> DictConfig:
    """The config with the index that a source's conversations searched, unless it names a service."""
    if config.retrieval.url is not None:
        return config
    settings = source.settings
    searched = {name: settings[name] for name in ("index", "chroma", "faiss") if name in settings}
    retrieval = {name: settings["retrieval"].get(name) for name in ("embedder", "url")}
    # Lines of a FAISS index lie below it.
    paths = {"corpus": settings["paths"]["corpus"]}
    merged = OmegaConf.merge(config, searched, {"retrieval": retrieval, "paths": paths})
    assert isinstance(merged, DictConfig)
    return merged


def searching_as_first(config: DictConfig) -> DictConfig:
    """The config as `searching_as` the first run to learn from. Unchanged if `check_demonstrations` fails."""
    with suppress(UserError):
        return searching_as(config, read_source(Path(config.demonstrations[0])))
    return config


def check_demonstrations(ctx: CheckContext) -> Iterator[Finding]:
    """There must be runs to learn from, or an endpoint that makes one, and a batch for every GPU."""
    config = ctx.config
    if bool(config.demonstrations) == bool(config.endpoint):
        both = "both runs and an endpoint are named" if config.endpoint else "there is nothing to learn from"
        yield error("demonstrations", both, "name runs of preview or synthesize (from=), or set endpoint=")
    for folder in config.demonstrations:
        source = read_source(Path(folder))
        if config.check:
            yield from _check_index(searching_as(config, source), source)
    if config.batch_size % config.machine.gpus:
        why = f"{config.batch_size} demonstrations do not divide over {config.machine.gpus} GPUs"
        yield error("batch_size", why, f"choose a multiple of {config.machine.gpus}")
    if config.terms is None:
        why = "nobody has stated under whose terms the teacher's words may train a model"
        yield note("terms", why, "set terms= for the model's card")


def _check_index(config: DictConfig, source: Source) -> Iterator[Finding]:
    try:
        fingerprint_index(config)
    except UserError as reason:
        why = f"the check cannot search the index of {source.name} ({' '.join(str(reason).split())})"
        yield error("demonstrations", why, "put it back, name a service (retrieval.url=), or set check=0")
