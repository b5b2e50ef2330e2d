"""The ownership ledger: who owns each block of a KV pool.

    FREE -> LOADING(transfer) -> LIVE(refs) -> CACHED(hash) -> FREE
    FREE -> LIVE,  LOADING -> FREE (abort),  LIVE -> FREE (unregistered),  CACHED -> LIVE (match)

Every block is in exactly one state and these transitions are the only way to change it. Tickets
are counted promises of blocks on top: the ledger never lets unpromised work take a block that a
promise needs, so `promised <= free + cached` always holds. It moves no bytes and knows no rows'
content; callers give blocks back only when no step, gather or scatter can still touch them.
One short internal lock makes every public method safe to call from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from cluster.errors import LedgerError
from cluster.kv.eviction import PrefixRows
from cluster.types import AttemptKey, BlockCounts, BlockHash, BlockId

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


class BlockLedger:
    """States, references, promises and prefix cache of `num_blocks` blocks.

    Unless a method says otherwise it costs O(1) a block and raises LedgerError on misuse, which
    is always a bug of the caller.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        """Start with every block free; without `prefix_cache` nothing is ever registered."""
        if num_blocks < 1 or block_size < 1:
            raise LedgerError(f"a pool of {num_blocks} blocks of {block_size} tokens is impossible")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._lock = threading.Lock()
        # Invariant: len(_free) + loading + len(_refs) + _prefix.num_parked == num_blocks.
        self._free: deque[BlockId] = deque(BlockId(row) for row in range(num_blocks))
        self._loading: dict[Hashable, list[BlockId]] = {}
        self._refs: dict[BlockId, int] = {}  # LIVE blocks, each count >= 1
        self._prefix = PrefixRows()
        # Invariant: _num_promised == sum(_promises.values()) <= free + cached.
        self._promises: dict[AttemptKey, int] = {}
        self._num_promised = 0

    # ---- tickets --------------------------------------------------------------------------------

    def promise(self, key: AttemptKey, num_blocks: int) -> bool:
        """Set `num_blocks` aside for `key`; False, and no change, when there is no room.

        Repeating it for a key that already has a promise changes nothing and returns True.
        """
        if num_blocks < 0:
            raise LedgerError(f"a promise of {num_blocks} blocks is impossible")
        with self._lock:
            if key in self._promises:
                return True
            if num_blocks > self._unpromised():
                return False
            self._promises[key] = num_blocks
            self._num_promised += num_blocks
            return True

    def forget(self, key: AttemptKey) -> None:
        """Drop what remains of a promise; unknown keys are ignored."""
        with self._lock:
            self._num_promised -= self._promises.pop(key, 0)

    def promised(self, key: AttemptKey) -> int:
        """Return the blocks still promised to `key`."""
        with self._lock:
            return self._promises.get(key, 0)

    def room(self, *, ticket: AttemptKey | None = None) -> int:
        """Return the most blocks that `allocate` would grant now."""
        with self._lock:
            return self._unpromised() + self._promise_of(ticket)

    # ---- prefix cache ---------------------------------------------------------------------------

    def match(
        self, hashes: Sequence[BlockHash], *, ticket: AttemptKey | None = None
    ) -> list[BlockId]:
        """Take a reference to each block of the longest cached run of `hashes`.

        Reviving a cached block uses room like an allocation does. With `ticket` every matched
        block is drawn from that promise while it lasts, since its job will not have to allocate
        it; without, the run ends where only promised room is left.
        """
        matched: list[BlockId] = []
        with self._lock:
            for block in self._cached_run(hashes):
                if self._prefix.is_parked(block):
                    if self._unpromised() + self._promise_of(ticket) < 1:
                        break
                    self._prefix.revive(block)
                    self._refs[block] = 1
                else:
                    self._refs[block] += 1
                self._draw(ticket, 1)
                matched.append(block)
        return matched

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """Return the length of the longest cached run of `hashes`, taking no references."""
        with self._lock:
            return len(self._cached_run(hashes))

    def register(self, block: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Make a live, full block whose KV is written findable under its chain hash.

        `parent` is the hash of the block before it, None for the first one. When another row
        already holds the hash, that one stays canonical and this one private.
        """
        with self._lock:
            if block not in self._refs:
                raise LedgerError(f"block {block} is not live and cannot be registered")
            if self.prefix_cache:
                self._prefix.register(block, block_hash, parent)

    # ---- allocation -----------------------------------------------------------------------------

    def allocate(
        self, num_blocks: int, *, ticket: AttemptKey | None = None
    ) -> list[BlockId] | None:
        """Make `num_blocks` blocks live with one reference each, evicting cached ones if needed.

        Draws on the promise of `ticket` first, then on unpromised room. None, and no change,
        when there is no room for all of them.
        """
        with self._lock:
            blocks = self._take(num_blocks, ticket)
            if blocks is not None:
                self._refs.update(dict.fromkeys(blocks, 1))
            return blocks

    def acquire(
        self,
        num_blocks: int,
        hashes: Sequence[BlockHash] = (),
        *,
        ticket: AttemptKey | None = None,
        spare_blocks: int = 0,
    ) -> tuple[list[BlockId], int] | None:
        """Match and allocate in one: all blocks of a sequence that is about to start.

        Args:
            num_blocks: blocks the sequence needs, at least as many as `hashes`.
            hashes: chain of the blocks that may be taken from the cache.
            ticket: promise to draw on first, as in `match` and `allocate`.
            spare_blocks: room that must be left over for others.

        Returns:
            The live blocks in chain order and how many of them are cached ones; None, and no
            change, when there is no room.
        """
        if num_blocks < len(hashes):
            raise LedgerError(f"{len(hashes)} hashes cannot belong to {num_blocks} blocks")
        with self._lock:
            rows = self._cached_run(hashes)
            revived = [row for row in rows if self._prefix.is_parked(row)]
            fresh = num_blocks - len(rows)
            room = self._unpromised() + self._promise_of(ticket)
            if len(revived) + fresh + spare_blocks > room:
                return None
            for row in revived:
                self._prefix.revive(row)
                self._refs[row] = 0
            for row in rows:
                self._refs[row] += 1
            self._draw(ticket, len(rows))
            blocks = self._take(fresh, ticket)
            assert blocks is not None, "drawing on a ticket never changes the room it gives"
            self._refs.update(dict.fromkeys(blocks, 1))
            return rows + blocks, len(rows)

    def begin_loading(
        self, transfer: Hashable, num_blocks: int, *, ticket: AttemptKey
    ) -> list[BlockId] | None:
        """Bind `num_blocks` blocks to a transfer that will write them; None without room."""
        with self._lock:
            if transfer in self._loading:
                raise LedgerError(f"transfer {transfer!r} is already loading")
            blocks = self._take(num_blocks, ticket)
            if blocks is not None:
                self._loading[transfer] = list(blocks)
            return blocks

    def finish_loading(self, transfer: Hashable) -> list[BlockId]:
        """Hand a verified transfer's blocks to their sequence: live, one reference each."""
        with self._lock:
            blocks = self._loading.pop(transfer, None)
            if blocks is None:
                raise LedgerError(f"transfer {transfer!r} is not loading")
            self._refs.update(dict.fromkeys(blocks, 1))
            return blocks

    def abort_loading(self, transfer: Hashable) -> None:
        """Free a transfer's blocks; call it only when no scatter can still touch the rows.

        Unknown transfers are ignored. What was drawn from a ticket does not return to it.
        """
        with self._lock:
            self._free.extend(self._loading.pop(transfer, ()))

    def share(self, ids: Iterable[BlockId]) -> None:
        """Take one more reference to each of these live blocks."""
        with self._lock:
            blocks = list(ids)
            self._require_live(blocks)
            for block in blocks:
                self._refs[block] += 1

    def release(self, ids: Iterable[BlockId]) -> None:
        """Give one reference of each block back; pass a sequence's blocks in chain order.

        A block without references is cached when registered, else free. The last block of the
        chain is the first to be evicted later.
        """
        with self._lock:
            blocks = list(ids)
            self._require_live(blocks)
            for block in reversed(blocks):
                refs = self._refs.get(block, 0) - 1
                if refs < 0:
                    raise LedgerError(f"block {block} was released more often than referenced")
                if refs:
                    self._refs[block] = refs
                    continue
                del self._refs[block]
                if self._prefix.is_registered(block):
                    self._prefix.park(block)
                else:
                    self._free.append(block)

    # ---- numbers --------------------------------------------------------------------------------

    def counts(self) -> BlockCounts:
        """Return the ledger in numbers."""
        with self._lock:
            return BlockCounts(
                total=self.num_blocks,
                free=len(self._free),
                loading=sum(map(len, self._loading.values())),
                live=len(self._refs),
                cached=self._prefix.num_parked,
                promised=self._num_promised,
            )

    def check_integrity(self) -> None:
        """Raise LedgerError when an invariant of the ledger does not hold. O(total blocks)."""
        with self._lock:
            states: dict[BlockId, str] = {}
            loading = [block for blocks in self._loading.values() for block in blocks]
            for state, blocks in (
                ("free", list(self._free)),
                ("loading", loading),
                ("live", list(self._refs)),
                ("cached", self._prefix.parked_rows()),
            ):
                for block in blocks:
                    if block in states:
                        raise LedgerError(f"block {block} is both {states[block]} and {state}")
                    states[block] = state
            if sorted(states) != list(range(self.num_blocks)):
                raise LedgerError("a block is in no state, or not of this pool")
            for block, state in states.items():
                if state in {"free", "loading"} and self._prefix.is_registered(block):
                    raise LedgerError(f"block {block} is {state} yet registered")
            if any(refs < 1 for refs in self._refs.values()):
                raise LedgerError("a live block has no reference")
            self._check_promises()
            self._prefix.check_integrity()

    # ---- under the lock -------------------------------------------------------------------------

    def _check_promises(self) -> None:
        """Raise LedgerError when promises do not add up or cannot be kept."""
        if self._num_promised != sum(self._promises.values()):
            raise LedgerError("the promises do not add up")
        if min(self._promises.values(), default=0) < 0 or self._unpromised() < 0:
            raise LedgerError("more blocks are promised than can be given")

    def _cached_run(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the rows of the longest cached run of `hashes`."""
        rows: list[BlockId] = []
        for block_hash in hashes:
            row = self._prefix.find(block_hash)
            if row is None:
                break
            rows.append(row)
        return rows

    def _unpromised(self) -> int:
        """Blocks that can be given to anyone: free or cached, and set aside for nobody."""
        return len(self._free) + self._prefix.num_parked - self._num_promised

    def _promise_of(self, ticket: AttemptKey | None) -> int:
        """Blocks still promised to `ticket`."""
        return 0 if ticket is None else self._promises.get(ticket, 0)

    def _draw(self, ticket: AttemptKey | None, num_blocks: int) -> None:
        """Take up to `num_blocks` off the promise of `ticket`."""
        drawn = min(num_blocks, self._promise_of(ticket))
        if drawn and ticket is not None:
            self._promises[ticket] -= drawn
            self._num_promised -= drawn

    def _take(self, num_blocks: int, ticket: AttemptKey | None) -> list[BlockId] | None:
        """Remove `num_blocks` from FREE, then from CACHED; None when the room is too small."""
        if num_blocks < 0:
            raise LedgerError(f"{num_blocks} blocks cannot be allocated")
        if num_blocks > self._unpromised() + self._promise_of(ticket):
            return None
        self._draw(ticket, num_blocks)
        from_free = min(num_blocks, len(self._free))
        blocks = [self._free.popleft() for _ in range(from_free)]
        blocks.extend(self._prefix.evict() for _ in range(num_blocks - from_free))
        return blocks

    def _require_live(self, blocks: Sequence[BlockId]) -> None:
        """Raise LedgerError unless every block is live."""
        for block in blocks:
            if block not in self._refs:
                raise LedgerError(f"block {block} is not live")
