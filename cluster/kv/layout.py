"""Shape of one KV block: what a pool row holds, in bytes and in words.

A row holds `block_size` tokens of every layer, K and V, in one contiguous run; both workers of a
pair must agree on every field, so the layout can describe itself for the session handshake.
Pure: never imports torch, so that preflight checks and the router may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one layer and token: `k_heads * k_dim` plus `v_heads * v_dim` values."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    @property
    def k_size(self) -> int:
        """Values of K a token, `k_heads * k_dim`."""
        return self.k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        """Values of V a token, `v_heads * v_dim`."""
        return self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layers in order, element type and tokens a block; a row is K0 V0 K1 V1 ... contiguous."""

    layers: tuple[LayerShape, ...]
    dtype: str  # a key of DTYPE_BYTES
    block_size: int  # tokens a block

    @property
    def token_values(self) -> int:
        """KV values of one token over all layers."""
        return sum(layer.k_size + layer.v_size for layer in self.layers)

    @property
    def block_values(self) -> int:
        """Values of one row."""
        return self.token_values * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one row."""
        return self.block_values * DTYPE_BYTES[self.dtype]

    def describe(self) -> dict[str, str]:
        """Fields a handshake compares one by one, so that a refusal names the one that differs."""
        runs = [(shape, len(list(run))) for shape, run in groupby(self.layers)]
        shapes = ",".join(
            f"{count}x(k{s.k_heads}x{s.k_dim},v{s.v_heads}x{s.v_dim})" for s, count in runs
        )
        return {
            "num_layers": str(len(self.layers)),
            "kv_dtype": self.dtype,
            "block_size": str(self.block_size),
            "kv_heads": shapes,
            "block_bytes": str(self.block_bytes),
        }
