"""The block ledger: states, promises, prefix cache and eviction order."""

from __future__ import annotations

import pytest

from cluster.errors import LedgerError
from cluster.kv.allocator import BlockLedger
from cluster.kv.hashing import chain_hashes
from cluster.types import AttemptKey, BlockId, RequestId

_A = AttemptKey(RequestId("a"), 1)
_B = AttemptKey(RequestId("b"), 1)


def _hashes(*tokens):
    return chain_hashes(tokens, block_size=1, seed=b"seed")


def _cache(ledger, hashes):
    """Write, register and release one chain; returns its rows."""
    held = ledger.match(hashes)
    rows = held + ledger.allocate(len(hashes) - len(held))
    for index, row in enumerate(rows):
        ledger.register(row, hashes[index], hashes[index - 1] if index else None)
    ledger.release(rows)
    return rows


def _states(ledger):
    ledger.check_integrity()
    counts = ledger.counts()
    return counts.free, counts.loading, counts.live, counts.cached, counts.promised


def test_allocation_is_all_or_nothing():
    ledger = BlockLedger(3, 16)
    rows = ledger.allocate(2)
    assert len(set(rows)) == 2
    assert ledger.allocate(2) is None
    assert _states(ledger) == (1, 0, 2, 0, 0)
    ledger.release(rows)
    assert _states(ledger) == (3, 0, 0, 0, 0)


def test_a_promise_is_kept_from_everybody_else():
    ledger = BlockLedger(4, 16)
    assert ledger.promise(_A, 3)
    assert not ledger.promise(_B, 2)
    assert ledger.allocate(2) is None
    assert ledger.room() == 1
    assert ledger.room(ticket=_A) == 4
    assert len(ledger.allocate(2, ticket=_A)) == 2
    assert ledger.promised(_A) == 1
    assert len(ledger.allocate(2, ticket=_A)) == 2  # one promised, one not
    assert _states(ledger) == (0, 0, 4, 0, 0)


def test_promises_are_idempotent_and_forgotten_once():
    ledger = BlockLedger(4, 16)
    assert ledger.promise(_A, 3)
    assert ledger.promise(_A, 3)
    assert ledger.counts().promised == 3
    ledger.forget(_A)
    ledger.forget(_A)
    assert _states(ledger) == (4, 0, 0, 0, 0)


def test_loading_ends_live_or_free():
    ledger = BlockLedger(4, 16)
    ledger.promise(_A, 3)
    rows = ledger.begin_loading(("p0", 1), 2, ticket=_A)
    assert _states(ledger) == (2, 2, 0, 0, 1)
    assert ledger.finish_loading(("p0", 1)) == rows
    ledger.begin_loading(("p0", 2), 1, ticket=_A)
    assert _states(ledger) == (1, 1, 2, 0, 0)
    ledger.abort_loading(("p0", 2))
    ledger.abort_loading(("p0", 2))
    assert _states(ledger) == (2, 0, 2, 0, 0)
    assert ledger.begin_loading(("p0", 3), 3, ticket=_A) is None


def test_a_cached_run_is_found_until_its_first_gap():
    ledger = BlockLedger(8, 1)
    rows = _cache(ledger, _hashes(1, 2, 3))
    assert ledger.peek(_hashes(1, 2, 9)) == 2
    assert ledger.match(_hashes(1, 2, 9)) == rows[:2]
    assert _states(ledger) == (5, 0, 2, 1, 0)
    assert ledger.match(_hashes(1)) == rows[:1]
    ledger.release(rows[:1])
    assert ledger.counts().live == 2
    ledger.release(rows[:2])
    assert _states(ledger) == (5, 0, 0, 3, 0)
    assert ledger.match(_hashes(9)) == []


def test_the_first_row_of_a_hash_stays_canonical():
    ledger = BlockLedger(4, 1)
    (value,) = _hashes(1)
    first, second = ledger.allocate(2)
    ledger.register(first, value, None)
    ledger.register(second, value, None)
    ledger.register(first, value, None)
    ledger.release([second])
    assert _states(ledger) == (3, 0, 1, 0, 0)  # the duplicate is free, not cached
    assert ledger.match([value]) == [first]


def test_eviction_takes_the_least_recently_used_chain_tail_first():
    ledger = BlockLedger(6, 1)
    old = _hashes(1, 2, 3)
    new = _hashes(7, 8, 9)
    _cache(ledger, old)
    _cache(ledger, new)
    for left in (2, 1, 0):
        ledger.allocate(1)
        assert ledger.peek(old) == left
        assert ledger.peek(new) == 3
    ledger.check_integrity()


def test_a_recently_used_head_outlives_older_leaves():
    ledger = BlockLedger(4, 1)
    chain, other = _hashes(1, 2), _hashes(7, 8)
    _cache(ledger, chain)
    _cache(ledger, other)
    ledger.release(ledger.match(chain[:1]))
    ledger.allocate(1)
    assert (ledger.peek(chain), ledger.peek(other)) == (1, 2)
    ledger.allocate(2)
    assert (ledger.peek(chain), ledger.peek(other)) == (1, 0)


def test_a_cached_parent_of_a_live_child_goes_only_when_no_leaf_is_left():
    ledger = BlockLedger(4, 1)
    chain = _hashes(1, 2)
    parent, duplicate, child = ledger.allocate(3)
    ledger.register(parent, chain[0], None)
    ledger.register(child, chain[1], chain[0])
    ledger.release([parent])  # cached before the leaf below, yet it has a child
    _cache(ledger, _hashes(5))
    ledger.allocate(1)
    assert ledger.peek(chain) == 2
    assert ledger.peek(_hashes(5)) == 0
    ledger.allocate(1)
    assert ledger.peek(chain) == 0
    assert ledger.allocate(1) is None
    ledger.release([duplicate, child])
    assert _states(ledger) == (1, 0, 2, 1, 0)


def test_cached_blocks_never_hide_room_that_is_promised():
    ledger = BlockLedger(4, 1)
    chain = _hashes(1, 2, 3, 4)
    rows = _cache(ledger, chain)
    ledger.promise(_A, 3)
    assert ledger.match(chain) == rows[:1]  # reviving more would take promised room
    ledger.release(rows[:1])
    assert ledger.match(chain[:2], ticket=_A) == rows[:2]
    assert _states(ledger) == (0, 0, 2, 2, 1)
    assert len(ledger.allocate(2, ticket=_A)) == 2
    ledger.check_integrity()


def test_a_hit_on_a_live_block_needs_no_promise_any_more():
    ledger = BlockLedger(4, 1)
    (row,) = ledger.allocate(1)
    ledger.register(row, _hashes(1)[0], None)
    ledger.promise(_A, 3)
    assert ledger.match(_hashes(1), ticket=_A) == [row]
    assert _states(ledger) == (3, 0, 1, 0, 2)


def test_acquire_takes_cached_blocks_first_and_all_from_the_ticket():
    ledger = BlockLedger(6, 1)
    rows = _cache(ledger, _hashes(1, 2))
    ledger.promise(_A, 3)
    assert ledger.acquire(4, _hashes(1, 2), spare_blocks=0) is None  # only 3 are not promised
    assert ledger.acquire(3, _hashes(1, 2), spare_blocks=1) is None
    blocks, num_cached = ledger.acquire(4, _hashes(1, 2, 3), ticket=_A, spare_blocks=2)
    assert (blocks[:2], num_cached, len(set(blocks))) == (rows, 2, 4)
    assert _states(ledger) == (2, 0, 4, 0, 0)
    # Shared rows take no room, and lower a promise all the same.
    ledger.promise(_B, 2)
    blocks, num_cached = ledger.acquire(2, _hashes(1, 2), ticket=_B)
    assert (blocks, num_cached) == (rows, 2)
    assert _states(ledger) == (2, 0, 4, 0, 0)


def test_without_prefix_cache_nothing_is_kept():
    ledger = BlockLedger(2, 1, prefix_cache=False)
    _cache(ledger, _hashes(1, 2))
    assert ledger.peek(_hashes(1)) == 0
    assert _states(ledger) == (2, 0, 0, 0, 0)


def _register_free(ledger):
    ledger.register(BlockId(0), b"x", None)


def _register_twice(ledger):
    (row,) = ledger.allocate(1)
    ledger.register(row, _hashes(1)[0], None)
    ledger.register(row, _hashes(2)[0], None)


def _release_twice(ledger):
    rows = ledger.allocate(1)
    ledger.release(rows * 2)


def _load_twice(ledger):
    ledger.begin_loading("t", 1, ticket=_A)
    ledger.begin_loading("t", 1, ticket=_A)


@pytest.mark.parametrize(
    "misuse",
    [
        _register_free,
        _register_twice,
        _release_twice,
        _load_twice,
        lambda ledger: ledger.release([BlockId(1)]),
        lambda ledger: ledger.share([BlockId(1)]),
        lambda ledger: ledger.finish_loading("t"),
        lambda ledger: ledger.allocate(-1),
        lambda ledger: ledger.promise(_A, -1),
    ],
)
def test_misuse_is_an_error(misuse):
    with pytest.raises(LedgerError):
        misuse(BlockLedger(2, 1))
