"""Names that SGLang imports to move KV states between GPU and host memory. On a CPU nothing calls them."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} needs CUDA")

    return refuse
