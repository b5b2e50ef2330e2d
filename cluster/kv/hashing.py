"""Content identity of KV blocks: a SHA-256 chain over token ids.

A block's hash covers its own tokens and, through its parent, every token before it, so equal
hashes mean equal KV. The chain starts at a seed made of the model fingerprint, the tenant's salt
and the adapter, so caches of different models or tenants never meet. Everything here is
deterministic across processes, machines and restarts. Pure: no state, no clock.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from cluster.types import BlockHash

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain_seed(fingerprint: str, cache_salt: str, adapter: str = "") -> bytes:
    """Return the 32-byte value a chain starts from.

    Each field is tagged and length-prefixed, so no two different triples give the same bytes.
    """
    digest = hashlib.sha256(b"diptych.kv.v1")
    fields = ((b"model", fingerprint), (b"salt", cache_salt), (b"adapter", adapter))
    for tag, text in fields:
        value = text.encode("utf-8")
        digest.update(tag + struct.pack("<Q", len(value)) + value)
    return digest.digest()


def extend_chain(parent: bytes, block_tokens: Sequence[int]) -> BlockHash:
    """Return the hash of one full block that follows `parent` (a block's hash or the seed)."""
    packed = struct.pack(f"<{len(block_tokens)}Q", *block_tokens)
    return BlockHash(hashlib.sha256(parent + packed).digest())


def chain_hashes(token_ids: Sequence[int], *, block_size: int, seed: bytes) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids`, first block first.

    A partial last block has no hash: its content may still change.
    """
    hashes: list[BlockHash] = []
    parent = seed
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = extend_chain(parent, token_ids[start : start + block_size])
        hashes.append(BlockHash(parent))
    return hashes


def prompt_digest(token_ids: Sequence[int]) -> int:
    """Return an unsigned 64-bit digest of a whole prompt, for drawing of `engine: timed`."""
    packed = struct.pack(f"<{len(token_ids)}Q", *token_ids)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
