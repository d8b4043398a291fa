"""Lets torchvision for CUDA be imported next to a torch without it (torchvision 0.28.0).

Its operators do not load then. `without_cuda.pth` (`make rehearse-sglang`) loads this at Python's start.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _DeclareOperators(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision._meta_registrations":
            return
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
