"""SGLang's own server, started where there is no CUDA: what test_sglang_server.py talks to.

    export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/compat/cpu_standin
    $DRZERO_SGLANG_PYTHON tests/compat/serve_sglang.py --device cpu --model-path …

The arguments are those of `python -m sglang.launch_server`. The processes that SGLang starts import this file
before anything else, so that each of them has the two declarations below.
"""

import sys

import torch

# torchvision's package for CUDA does not load its operators without it, and fails where it describes them.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
