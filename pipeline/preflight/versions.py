"""Versions that are known to work together (ops/versions.py), and which of them a run needs.

For a run on another machine, the versions installed here are irrelevant: a note then lists the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ops.versions import pinned
from pipeline.preflight.context import CheckContext
from pipeline.preflight.finding import Finding, error, note, warning
from verl_ext.sglang.compat import refusal


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
        {name: pinned(name, gpu=True) for name in ("verl", "torch", "sglang", "transformers", "flash-attn")},
        "constraints-gpu.txt: veRL's own GPU pins; SGLang pins transformers 5.6.0, which veRL refuses: "
        "override that pin",
    ),
    Combination(
        "reference engine",
        {name: pinned(name) for name in ("verl", "torch", "transformers")},
        "constraints.txt: what this project's tests run with",
    ),
)
# What the pinned veRL declares.
_VERL_WANTS = {
    "transformers": SpecifierSet(">=5.5.3,!=5.6.0,<5.11"),
    "tensordict": SpecifierSet(">=0.8,!=0.9.0,<=0.10"),
}
_VERL = pinned("verl")
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def installed(package: str) -> str | None:
    """The installed version of a package here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(ctx: CheckContext) -> Iterator[Finding]:
    """The installed versions must be those that the stage's engines support."""
    wants_sglang = _uses_sglang(ctx)
    known = COMBINATIONS[0] if wants_sglang else COMBINATIONS[1]
    if not ctx.machine.is_here:
        if wants_sglang:
            listed = ", ".join(f"{name} {version}" for name, version in known.versions.items())
            yield note(
                "versions", "not checked here", f"the machine of the run needs {listed} ({known.source})"
            )
        return
    if ctx.trains:
        yield from _verl()
        yield from _attention(ctx, known)
    if wants_sglang:
        yield from _sglang(ctx, known)


def _uses_sglang(ctx: CheckContext) -> bool:
    config = ctx.config
    rollout = config.actor_rollout_ref.rollout.name if ctx.trains else None
    served = config.solver.engine if ctx.serves_model else None
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


def _sglang(ctx: CheckContext, known: Combination) -> Iterator[Finding]:
    version = installed("sglang")
    rollout = ctx.config.actor_rollout_ref.rollout.name if ctx.trains else None
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


def _attention(ctx: CheckContext, known: Combination) -> Iterator[Finding]:
    """flash-attn must be installed if the actor computes with it, which is veRL's default."""
    model = ctx.config.actor_rollout_ref.model
    chosen = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if chosen != "flash_attention_2":
        return
    if ctx.config.trainer.device == "cpu":
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
