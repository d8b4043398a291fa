"""Versions that are known to work together: the one table, and what of it a run needs.

Where the machine that runs is another than this one, what is installed here says nothing: then the table is
told, not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pipeline.finding import Finding, error, note, warning
from verl_ext.sglang_compat import refusal

if TYPE_CHECKING:
    from pipeline.subject import Subject


@dataclass(frozen=True)
class Combination:
    """Versions that ran, or are pinned, together."""

    name: str
    versions: dict[str, str]
    source: str


# The first whose name fits the hardware is the one to build on.
COMBINATIONS = (
    Combination(
        "gpu with SGLang",
        {
            "verl": "0.9.1",
            "torch": "2.11.0",
            "sglang": "0.5.12",
            "transformers": "5.9.0",
            "flash-attn": "2.8.3",
        },
        "veRL 0.9.1's own GPU pins; SGLang 0.5.12 pins transformers 5.6.0, which veRL refuses: override that "
        "pin",
    ),
    Combination(
        "reference engine",
        {"verl": "0.9.1", "torch": "2.13.0", "transformers": "5.9.0"},
        "what this project's tests run with",
    ),
)
# What veRL 0.9.1 declares.
_VERL_WANTS = {
    "transformers": SpecifierSet(">=5.5.3,!=5.6.0,<5.11"),
    "tensordict": SpecifierSet(">=0.8,!=0.9.0,<=0.10"),
}
_VERL = "0.9.1"
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def installed(package: str) -> str | None:
    """The installed version of a package here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(subject: Subject) -> Iterator[Finding]:
    """What is installed must be what the stage's engines were made for."""
    wants_sglang = _uses_sglang(subject)
    known = COMBINATIONS[0] if wants_sglang else COMBINATIONS[1]
    if not subject.machine.is_here:
        if wants_sglang:
            listed = ", ".join(f"{name} {version}" for name, version in known.versions.items())
            yield note(
                "versions", "not judged here", f"the machine that runs this needs {listed} ({known.source})"
            )
        return
    if subject.trains:
        yield from _verl()
        yield from _attention(subject, known)
    if wants_sglang:
        yield from _sglang(subject, known)


def _uses_sglang(subject: Subject) -> bool:
    config = subject.config
    rollout = config.actor_rollout_ref.rollout.name if subject.trains else None
    served = config.solver.engine if subject.serves_model else None
    return "sglang" in (rollout, served)


def _verl() -> Iterator[Finding]:
    verl = installed("verl")
    if verl != _VERL:
        yield error(
            "verl",
            verl,
            f"this project extends veRL {_VERL}, and {verl} is installed",
            f"install verl=={_VERL}",
        )
    for package, wanted in _VERL_WANTS.items():
        version = installed(package)
        if version is None or not wanted.contains(Version(version)):
            yield error(
                package,
                version,
                f"veRL {_VERL} wants {package}{wanted}, and {version} is installed",
                f"install {package}{wanted}",
            )


def _sglang(subject: Subject, known: Combination) -> Iterator[Finding]:
    version = installed("sglang")
    rollout = subject.config.actor_rollout_ref.rollout.name if subject.trains else None
    key = "actor_rollout_ref.rollout.name" if rollout == "sglang" else "solver.engine"
    if version is None:
        yield error(
            key,
            "sglang",
            "this profile needs SGLang, which is not installed (see 'GPUs' in the README)",
            f"install sglang=={known.versions['sglang']}, or use hardware=cpu",
        )
        return
    if reason := refusal():
        yield error(key, version, reason, "")
    for package, found in (("sglang", version), ("torch", installed("torch"))):
        wanted = known.versions[package]
        if found is None or Version(found).base_version != wanted:
            yield warning(
                package,
                found,
                f"{package} {found} is not in the table of combinations that work ({known.source}): SGLang's "
                "internals "
                "move from version to version",
                f"install {package}=={wanted}",
            )


def _attention(subject: Subject, known: Combination) -> Iterator[Finding]:
    """flash-attn must be there where the actor computes with it, which is veRL's default."""
    model = subject.config.actor_rollout_ref.model
    chosen = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if chosen != "flash_attention_2":
        return
    if subject.config.trainer.device == "cpu":
        yield error(_ATTENTION, chosen, "flash-attention needs a GPU", f"set {_ATTENTION}=sdpa")
        return
    version, wanted = installed("flash-attn"), COMBINATIONS[0].versions["flash-attn"]
    if version is None:
        yield error(
            _ATTENTION,
            chosen,
            "the actor computes with flash-attn, which is not installed",
            f"install a prebuilt wheel of flash-attn {wanted} for this torch, CUDA and Python (building it "
            "takes hours), "
            f"or set +{_ATTENTION}=sdpa",
        )
    elif Version(version).base_version != wanted:
        yield warning(
            "flash-attn",
            version,
            f"flash-attn {version} is not the {wanted} of the table",
            f"install {wanted}",
        )
