"""Loading new weights into a live model, in place and strictly."""

from collections.abc import Iterable

import torch


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every (name, tensor) into `model`, which they must cover; dtypes and devices are converted.

    A tied weight (`lm_head` of a model that shares it with its embedding) counts as covered when its twin
    came. Raises ValueError for a name the model does not have, a shape that does not fit and names that never
    came. What came before the error stays loaded: the model is then neither the old nor the new one.
    """
    # state_dict shares memory with the parameters: copying into its tensors changes the model.
    targets = model.state_dict()
    loaded: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise ValueError(f"weight update: the model has no weight named {name!r}")
        if target.shape != tensor.shape:
            raise ValueError(
                f"weight update: {name} has shape {tuple(tensor.shape)}, in the model {tuple(target.shape)}"
            )
        target.copy_(tensor)
        loaded.add(target.data_ptr())
    missing = [name for name, target in targets.items() if target.data_ptr() not in loaded]
    if missing:
        raise ValueError(
            f"weight update: {len(missing)} of {len(targets)} weights never came, the first is {missing[0]}"
        )
