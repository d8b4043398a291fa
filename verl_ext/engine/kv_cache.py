"""Keys and values of the sequences being decoded (`SlotCache`) and of finished ones (`PrefixCache`).

One tensor (layers, 2, slots, kv heads, positions, head size) holds all, so a prefix moves in one copy.
Running sequences fill slots 0..n-1.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED_ATTENTION = "grouped_sdpa"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Read grouped keys and values in place, which transformers' sdpa path copies for each query group.

    Query (b, heads, n, size), key and value (b, kv heads, positions, size), result (b, n, heads, size).
    """
    batch, heads, queries, size = query.shape
    if queries > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, 1, heads, size), None


# Without a mask builder: the engine passes complete masks, and None means plain causal attention.
AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)


class CacheWindow(Cache):
    """The part of the cache that one forward uses: `write` indexes new entries, `read` all visible ones."""

    def __init__(self, store: torch.Tensor, write: tuple[Any, ...], read: tuple[Any, ...]) -> None:
        super().__init__(layers=[])
        self._store, self._write, self._read = store, write, read

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new (batch, kv heads, queries, size) states. Returns views of all that are read."""
        keys, values = self._store[layer_idx]
        # Each window drops a dimension of size 1: the queries (decode) or the batch (prefill).
        squeezed = 2 if isinstance(self._write[0], torch.Tensor) else 0
        keys[self._write] = key_states.squeeze(squeezed)
        values[self._write] = value_states.squeeze(squeezed)
        return keys[self._read], values[self._read]


class SlotCache:
    """The growing store of the sequences in flight. Raises ValueError for models it cannot serve."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{config.model_type} has layers of kind {sorted(kinds)}; the reference engine serves full "
                "attention. Use a Llama, Qwen2 or Qwen3 type model without sliding windows, or another engine"
            )
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, 0, config.num_key_value_heads, 0, head_size)
        self._store = torch.zeros(shape, dtype=dtype, device=device)

    def reserve(self, slots: int, positions: int) -> None:
        """Grow to at least this size, keeping the contents."""
        _, _, old_slots, _, old_positions, _ = old_shape = self._store.shape
        if slots <= old_slots and positions <= old_positions:
            return
        shape = list(old_shape)
        shape[2] = max(old_slots, _power_of_two(slots))
        shape[4] = max(old_positions, _power_of_two(max(positions, 128)))
        # Zeros: a masked position weighs 0, but 0 times an uninitialized NaN is NaN.
        grown = self._store.new_zeros(shape)
        grown[:, :, :old_slots, :, :old_positions] = self._store
        self._store = grown

    def release(self) -> None:
        """Free the store."""
        self._store = self._store[:, :, :0, :, :0].clone()

    def read(self, slot: int, length: int) -> torch.Tensor:
        """View of one slot's first `length` positions: (layers, 2, kv heads, length, head size)."""
        return self._store[:, :, slot, :, :length]

    def write(self, slot: int, states: torch.Tensor) -> None:
        """Copy `states`, shaped as in `read`, to the start of a slot."""
        self._store[:, :, slot, :, : states.shape[3]] = states

    def blank(self, slot: int) -> None:
        """Clear a slot's states, because a NaN in them would spoil later sequences even when masked."""
        self._store[:, :, slot] = 0

    def decode_window(self, positions: torch.Tensor, longest: int) -> CacheWindow:
        """Window that writes one entry to each of the first `len(positions)` slots."""
        rows = torch.arange(len(positions), device=positions.device)
        write = (rows, slice(None), positions)
        return CacheWindow(self._store, write, (slice(0, len(positions)), slice(None), slice(0, longest)))

    def prefill_window(self, slot: int, start: int, end: int) -> CacheWindow:
        """Window that writes positions `start` to `end` of one slot and reads everything before `end`."""
        write = (slot, slice(None), slice(start, end))
        return CacheWindow(self._store, write, (slice(slot, slot + 1), slice(None), slice(0, end)))


class PrefixCache:
    """Finished sequences within `max_bytes`, the oldest dropped first. Clear it when the weights change."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, tuple[np.ndarray, torch.Tensor]] = OrderedDict()

    def longest_match(self, ids: np.ndarray) -> torch.Tensor | None:
        """States of the longest stored prefix of `ids`, (layers, 2, kv heads, length, head size), or None."""
        best_key, best_length = b"", 0
        for key, (stored, _) in self._entries.items():
            length = common_prefix_length(stored, ids)
            if length > best_length:
                best_key, best_length = key, length
        if not best_length:
            return None
        self._entries.move_to_end(best_key)
        return self._entries[best_key][1][:, :, :, :best_length]

    def insert(self, ids: np.ndarray, states: torch.Tensor) -> None:
        """Keep a copy of the states of `ids`, replacing entries that `ids` extends."""
        size = states.numel() * states.element_size()
        if size > self.max_bytes or not len(ids):
            return
        for key, (stored, _) in list(self._entries.items()):
            shared = common_prefix_length(stored, ids)
            if shared == len(ids):
                self._entries.move_to_end(key)
                return
            if shared == len(stored):
                self._drop(key)
        while self.used_bytes + size > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[ids.tobytes()] = (ids, states.clone(memory_format=torch.contiguous_format))
        self.used_bytes += size

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.used_bytes = 0

    def _drop(self, key: bytes) -> None:
        _, states = self._entries.pop(key)
        self.used_bytes -= states.numel() * states.element_size()


def common_prefix_length(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Number of equal leading ids."""
    length = min(len(first), len(second))
    differs = np.asarray(first)[:length] != np.asarray(second)[:length]
    return int(differs.argmax()) if differs.any() else length


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
