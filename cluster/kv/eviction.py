"""Which rows hold which hashed block, and which unreferenced row gives way first.

The index knows every registered row (a full block whose KV is written) by its chain hash, and
orders the rows nobody references for eviction: least recently used, leaf first. A row with
registered children goes only when no leaf is left, since without it its children are out of
reach. Looking up, parking and reviving are O(1) a row, apart from a heap push of O(log n).
Not locked: the ledger that owns it holds its own lock. Pure: no clock, a counter orders uses.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import LedgerError

if TYPE_CHECKING:
    from cluster.types import BlockHash, BlockId

_HEAP_SLACK = 64  # stale entries tolerated beyond twice the parked rows


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a registered row holds."""

    block_hash: BlockHash
    parent: BlockHash | None  # None for the first block of a chain


class PrefixRows:
    """Registered rows by hash, and the eviction order of those that are parked (unreferenced)."""

    def __init__(self) -> None:
        """Start with nothing registered."""
        self._entries: dict[BlockId, _Entry] = {}
        self._rows: dict[BlockHash, BlockId] = {}  # inverse of _entries
        self._children: dict[BlockHash, int] = {}  # registered rows by parent hash; no zeros
        # Parked rows, oldest first, with the use that parked them. Uses only grow.
        self._parked: OrderedDict[BlockId, int] = OrderedDict()
        # (use, row) of parked leaves, plus stale entries that `_is_parked_leaf` tells apart.
        self._leaves: list[tuple[int, BlockId]] = []
        self._uses = 0

    @property
    def num_parked(self) -> int:
        """Rows that are registered and unreferenced."""
        return len(self._parked)

    def parked_rows(self) -> list[BlockId]:
        """Return the parked rows, least recently used first."""
        return list(self._parked)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the canonical row of a hash."""
        return self._rows.get(block_hash)

    def is_registered(self, block: BlockId) -> bool:
        """Say whether `block` is the canonical row of some hash."""
        return block in self._entries

    def is_parked(self, block: BlockId) -> bool:
        """Say whether `block` is registered and waits unreferenced."""
        return block in self._parked

    def register(self, block: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Make `block` the canonical row of `block_hash` unless another row already is.

        Returns:
            Whether `block` is canonical now.

        Raises:
            LedgerError: the row is registered under another hash.
        """
        entry = self._entries.get(block)
        if entry is not None:
            if entry.block_hash != block_hash:
                raise LedgerError(f"block {block} is already registered under another hash")
            return True
        if block_hash in self._rows:
            return False
        self._entries[block] = _Entry(block_hash, parent)
        self._rows[block_hash] = block
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return True

    def park(self, block: BlockId) -> None:
        """Note that a registered row lost its last reference: it is now the newest to evict."""
        self._uses += 1
        self._parked[block] = self._uses
        self._offer_leaf(block)

    def revive(self, block: BlockId) -> None:
        """Take a parked row out of the eviction order; it stays registered."""
        del self._parked[block]

    def evict(self) -> BlockId:
        """Forget the parked row that should go first, and return it.

        Raises:
            LedgerError: nothing is parked.
        """
        block = self._pop_victim()
        del self._parked[block]
        entry = self._entries.pop(block)
        del self._rows[entry.block_hash]
        if entry.parent is not None:
            self._drop_child(entry.parent)
        return block

    def _pop_victim(self) -> BlockId:
        """Return the oldest parked leaf, or the oldest parked row when there is no leaf."""
        while self._leaves:
            use, block = heapq.heappop(self._leaves)
            if self._is_parked_leaf(use, block):
                return block
        if not self._parked:
            raise LedgerError("there is no cached block to evict")
        return next(iter(self._parked))

    def _drop_child(self, parent: BlockHash) -> None:
        """Count one child of `parent` less; a parked parent without children becomes a leaf."""
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        row = self._rows.get(parent)
        if row is not None and row in self._parked:
            self._offer_leaf(row)

    def _offer_leaf(self, block: BlockId) -> None:
        """Put a parked row into the heap if it is a leaf; drop stale entries when they pile up."""
        if self._entries[block].block_hash in self._children:
            return
        heapq.heappush(self._leaves, (self._parked[block], block))
        if len(self._leaves) > 2 * len(self._parked) + _HEAP_SLACK:
            self._leaves = [leaf for leaf in self._leaves if self._is_parked_leaf(*leaf)]
            heapq.heapify(self._leaves)

    def _is_parked_leaf(self, use: int, block: BlockId) -> bool:
        """Say whether a heap entry still describes a row that may be evicted as a leaf."""
        return (
            self._parked.get(block) == use and self._entries[block].block_hash not in self._children
        )

    def check_integrity(self) -> None:
        """Raise LedgerError when hashes, children and the eviction order disagree."""
        children: dict[BlockHash, int] = {}
        for block, entry in self._entries.items():
            if self._rows.get(entry.block_hash) != block:
                raise LedgerError(f"block {block} and its hash do not name each other")
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        if len(self._rows) != len(self._entries):
            raise LedgerError("a hash names a row that is not registered")
        if children != self._children:
            raise LedgerError("the numbers of registered children are wrong")
        uses = list(self._parked.values())
        if uses != sorted(uses):
            raise LedgerError("the eviction order is not the order of use")
        offered = {block for use, block in self._leaves if self._is_parked_leaf(use, block)}
        for block in self._parked:
            entry_or_none = self._entries.get(block)
            if entry_or_none is None:
                raise LedgerError(f"cached block {block} is not registered")
            if entry_or_none.block_hash not in children and block not in offered:
                raise LedgerError(f"leaf {block} is missing from the eviction order")
