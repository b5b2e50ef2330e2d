"""The KV pool of a worker: one byte row a block, and typed views of it for the model.

Owns the memory and nothing else: which row belongs to whom is the ledger's business, and this
module never checks ownership. `gather` and `scatter` may be called from link threads while a step
runs, as long as the ledger has given the rows to the caller; they copy on the calling thread alone
(no OpenMP team, whose second master would slow the engine thread down) and drop the GIL for rows
of more than a few hundred bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import ModelError
from cluster.kv.layout import DTYPE_BYTES, KvLayout, LayerShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.types import BlockId

__all__ = ["DTYPE_BYTES", "KvLayout", "KvPool", "LayerShape", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's dtype name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


class KvPool:
    """`num_blocks` rows of `layout`, zeroed (lazily by the OS), never resized."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        """Allocate the rows.

        Raises:
            ModelError: the machine has not that much memory.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        try:
            # Zeros, not empty: masked positions are multiplied by a probability of 0, and an
            # unwritten NaN would survive that.
            self.rows = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            size_gb = num_blocks * layout.block_bytes / 1e9
            msg = f"cannot allocate a KV pool of {num_blocks} blocks ({size_gb:.1f} GB)"
            raise ModelError(msg) from error
        # rows: [num_blocks, block_bytes] uint8; _bytes shares its memory
        self._bytes: npt.NDArray[np.uint8] = self.rows.numpy()
        self._k: list[torch.Tensor] = []  # per layer [num_blocks, block_size, k_heads, k_dim]
        self._v: list[torch.Tensor] = []  # per layer [num_blocks, block_size, v_heads, v_dim]
        self._make_views()

    def _make_views(self) -> None:
        typed = self.rows.view(torch_dtype(self.layout.dtype))  # [num_blocks, block_values]
        block_size, first = self.layout.block_size, 0
        for layer in self.layout.layers:
            end = first + block_size * layer.k_size
            shape = (block_size, layer.k_heads, layer.k_dim)
            self._k.append(typed[:, first:end].unflatten(1, shape))
            first, end = end, end + block_size * layer.v_size
            shape = (block_size, layer.v_heads, layer.v_dim)
            self._v.append(typed[:, first:end].unflatten(1, shape))
            first = end

    def k(self, layer: int) -> torch.Tensor:
        """Return K of a layer, a strided view `[num_blocks, block_size, k_heads, k_dim]`."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Return V of a layer, a strided view `[num_blocks, block_size, v_heads, v_dim]`."""
        return self._v[layer]

    def gather(self, ids: Sequence[BlockId], out: torch.Tensor) -> None:
        """Copy rows `ids` into `out`, uint8 `[len(ids), block_bytes]`, contiguous, on the CPU."""
        target = self._check(ids, out)
        for index, block in enumerate(ids):
            np.copyto(target[index], self._bytes[block])

    def scatter(self, ids: Sequence[BlockId], src: torch.Tensor) -> None:
        """Copy `src`, uint8 `[len(ids), block_bytes]`, into rows `ids`."""
        source = self._check(ids, src)
        for index, block in enumerate(ids):
            np.copyto(self._bytes[block], source[index])

    def _check(self, ids: Sequence[BlockId], buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Refuse ids outside the pool and buffers of another shape: a bug, never input."""
        if ids and not 0 <= min(ids) <= max(ids) < self.num_blocks:
            msg = f"block ids must lie in 0..{self.num_blocks - 1}, got {min(ids)}..{max(ids)}"
            raise IndexError(msg)
        expected = (len(ids), self.layout.block_bytes)
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != expected:
            msg = f"row buffer must be uint8 {expected}, got {buffer.dtype} {tuple(buffer.shape)}"
            raise ValueError(msg)
        array: npt.NDArray[np.uint8] = buffer.numpy()
        return array

    def check_integrity(self) -> None:
        """Assert that the views tile each row exactly: no gap, no overlap."""
        values = sum(view[0].numel() for view in (*self._k, *self._v)) if self.num_blocks else 0
        expected = self.layout.block_values if self.num_blocks else 0
        assert values == expected, f"views cover {values} of {expected} values of a row"
