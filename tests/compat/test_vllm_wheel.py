"""What a run reads and passes of vLLM against the published wheel that veRL pins, which is not installed.

make compat      # DRZERO_COMPAT=1; downloads 280 MB
"""

import re
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from other_environment import only_by_make_compat

from drzero.stages.services import _PARSERS
from drzero.stages.startup_signs import VLLM

only_by_make_compat("downloads vLLM's wheel")

# Where a sign's line is written, if not as it is read.
SIGNS = {"Loading safetensors checkpoint shards": 'loading_desc = "Loading safetensors checkpoint shards"'}
SIZES = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_model_len")
NEEDS = [
    *((rf"^    {name}: ", "vllm/engine/arg_utils.py") for name in ("model", "dtype", *SIZES)),
    (r"^    (enable_auto_tool_choice|tool_call_parser): ", "vllm/entrypoints/openai/cli_args.py"),
    (r"envs\.VLLM_API_KEY", "vllm/entrypoints/openai/api_server.py"),
    (r"VLLM_NO_USAGE_STATS", "vllm/envs.py"),
    (r'"VLLM_PROCESS_NAME_PREFIX", "VLLM"', "vllm/envs.py"),
    (r'name="vllm:generation_tokens"', "vllm/v1/metrics/loggers.py"),
    (r'name="vllm:num_requests_waiting"', "vllm/v1/metrics/loggers.py"),
    (r"EngineCore encountered a fatal error", "vllm/v1/engine/core.py"),
    (r"^    return_token_ids: ", "vllm/entrypoints/openai/completion/protocol.py"),
    *((rf'"{name}": \(', "vllm/tool_parsers/__init__.py") for name in _PARSERS["vllm"].values()),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    (wanted,) = [one for one in metadata.requires("verl") if one.startswith("vllm")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(folder), wanted.partition(";")[0]]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {name: archive.read(name).decode() for name in names}


@pytest.mark.parametrize(("pattern", "file"), NEEDS)
def test_it_has_what_is_passed_and_read(sources, pattern, file):
    assert re.search(pattern, sources[file], re.MULTILINE)


@pytest.mark.parametrize("sign", VLLM)
def test_it_writes_the_signs_of_a_start(sources, sign):
    assert any(SIGNS.get(sign, sign) in text for text in sources.values())
