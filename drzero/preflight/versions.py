"""Checks of installed versions. For a run on another machine, a note lists the ones it needs."""

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from drzero.ops.versions import pinned
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.preflight.memory_ledger import attention
from verl_ext.sglang.compat import refusal
from verl_ext.sglang.cpu import refusal_on_cpu

_ON_GPU = {name: pinned(name, gpu=True) for name in ("verl", "torch", "sglang", "transformers", "flash-attn")}
_SOURCE = (
    "constraints-gpu.txt: veRL's own GPU pins; SGLang pins transformers 5.6.0, which veRL refuses: override "
    "that pin"
)
# Declared by the pinned veRL.
_VERL_WANTS = {
    "transformers": SpecifierSet(">=5.5.3,!=5.6.0,<5.11"),
    "tensordict": SpecifierSet(">=0.8,!=0.9.0,<=0.10"),
}
_VERL = pinned("verl")
_LEAST_VLLM = Version("0.18.0")  # verl/third_party/vllm/__init__.py
_CUPY = "cupy-cuda13x"
LIGER = "actor_rollout_ref.model.use_liger"


def installed(package: str) -> str | None:
    """A package's installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(ctx: CheckContext) -> Iterator[Finding]:
    """Installed versions must be ones that the stage's engines support."""
    config = ctx.config
    rollout_key = "actor_rollout_ref.rollout.name"
    engines = {rollout_key: config.actor_rollout_ref.rollout.name} if ctx.trains else {}
    engines |= {"solver.engine": config.solver.engine} if ctx.serves_model else {}
    of_vllm = [key for key, engine in engines.items() if engine == "vllm"]
    if of_vllm:
        yield from _vllm(of_vllm[0], ctx)
    of_sglang = [key for key, engine in engines.items() if engine == "sglang"]
    if of_sglang and not ctx.machine.is_here:
        listed = ", ".join(f"{name} {version}" for name, version in _ON_GPU.items())
        why = f"the machine of the run needs {listed} ({_SOURCE})"
        yield note("versions", why, value="not checked here")
    if not ctx.machine.is_here:
        return
    if ctx.trains and (verl := installed("verl")) != _VERL:
        why = f"this project extends veRL {_VERL}, and {verl} is installed"
        yield error("verl", why, f"install verl=={_VERL}", value=verl)
    for package, wanted in _VERL_WANTS.items() if ctx.trains else ():
        version = installed(package)
        if version is None or not wanted.contains(Version(version)):
            why = f"veRL {_VERL} wants {package}{wanted}, and {version} is installed"
            yield error(package, why, f"install {package}{wanted}", value=version)
    if ctx.trains:
        yield from _attention(ctx)
        yield from _liger(ctx)
        yield from _sending(ctx)
    if of_sglang and config.machine.device != "cpu":
        yield from _sglang(of_sglang[0])
    elif of_sglang and (reason := refusal_on_cpu()):
        fix = "use the environment that `make rehearse-sglang` makes (docs/sglang.md), or rollout=reference"
        yield error(of_sglang[0], reason, fix, value=installed("sglang"))


def _vllm(key: str, ctx: CheckContext) -> Iterator[Finding]:
    wanted = next(one for one in map(Requirement, metadata.requires("verl") or ()) if one.name == "vllm")
    install = f"in an environment of its own install verl[vllm]=={_VERL}, or use rollout=sglang"
    version = installed("vllm")
    if not ctx.machine.is_local:
        yield error(key, "Modal's image has SGLang, and vLLM wants other packages", "use rollout=sglang")
    elif not ctx.machine.is_here:
        why = f"the machine of the run needs {wanted.name}{wanted.specifier}, by veRL {_VERL}'s own pins"
        yield note("versions", why, value="not checked here")
    elif version is None:
        why = f"vLLM is not installed ({wanted.name}{wanted.specifier} fits veRL {_VERL})"
        yield error(key, why, install)
    elif Version(version) < _LEAST_VLLM:
        yield error(key, f"veRL {_VERL} supports vLLM {_LEAST_VLLM} or newer", install, value=version)
    elif not wanted.specifier.contains(Version(version).base_version):
        why = f"vLLM {version} is not veRL {_VERL}'s own {wanted.specifier}: its internals change"
        yield warning("vllm", why, install, value=version)


def _attention(ctx: CheckContext) -> Iterator[Finding]:
    if (chosen := attention(ctx.config)) != "flash_attention_2":
        return
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    if ctx.config.trainer.device == "cpu":
        yield error(key, "flash-attention needs a GPU", f"set {key}=sdpa", value=chosen)
        return
    version, wanted = installed("flash-attn"), _ON_GPU["flash-attn"]
    if version is None:
        yield error(
            key,
            "the actor uses flash-attn, which is not installed",
            f"install a prebuilt wheel of flash-attn {wanted} for this torch, CUDA and Python (building it "
            f"takes hours), or set ++{key}=drzero_packed: the kernels that torch brings",
            value=chosen,
        )
    elif Version(version).base_version != wanted:
        why = f"flash-attn {version} is not the {wanted} of the table"
        yield warning("flash-attn", why, f"install {wanted}", value=version)


def _liger(ctx: CheckContext) -> Iterator[Finding]:
    if not OmegaConf.select(ctx.config, LIGER):
        return
    if ctx.config.trainer.device == "cpu":
        yield error(LIGER, "Liger's kernels need a GPU", f"set {LIGER}=false")
    elif installed("liger-kernel") is None:
        why = "the update uses Liger's kernels, which are not installed"
        yield error(LIGER, why, f"install liger-kernel=={pinned('liger-kernel', gpu=True)}")


def _sending(ctx: CheckContext) -> Iterator[Finding]:
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    if OmegaConf.select(ctx.config, key) != "nccl" or find_spec("cupy") is not None:
        return
    wanted = f"{_CUPY}=={pinned(_CUPY, gpu=True)}"
    why = "veRL sends weights between GPUs by CuPy, which is not installed"
    yield error(key, why, f"install {wanted}, or the build for your CUDA")


def _sglang(key: str) -> Iterator[Finding]:
    if installed("sglang") is None:
        why = "this profile needs SGLang, which is not installed (see 'GPUs' in the README)"
        yield error(key, why, f"install sglang=={_ON_GPU['sglang']}, or use hardware=cpu")
        return
    if reason := refusal():
        yield error(key, reason, "", value=installed("sglang"))
    for package in ("sglang", "torch"):
        found, wanted = installed(package), _ON_GPU[package]
        if found is None or Version(found).base_version != wanted:
            yield warning(
                package,
                f"{package} {found} is not a tested combination ({_SOURCE}): SGLang's internals change "
                "between versions",
                f"install {package}=={wanted}",
                value=found,
            )
