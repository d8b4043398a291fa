"""Load new weights into a model in use: in place, and all of them or an error."""

from collections.abc import Iterable

import torch


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every (name, tensor) into `model`, which they must cover; dtypes and devices are converted.

    A tied weight (an `lm_head` that shares the embedding's tensor) counts as covered by the other name.
    Raises ValueError for an unknown name, a wrong shape, or missing names. Tensors before the error stay
    loaded: the model is then neither the old nor the new one.
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
            f"weight update: {len(missing)} of {len(targets)} weights are missing, the first is {missing[0]}"
        )
