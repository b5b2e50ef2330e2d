"""The block ledger against a model that keeps plain sets, under random operations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.kv.allocator import BlockLedger
from cluster.kv.hashing import chain_hashes
from cluster.types import AttemptKey, RequestId

_BLOCKS = 8
_KEYS = [AttemptKey(RequestId(name), 1) for name in "abc"]
_TICKETS = st.sampled_from([None, *_KEYS])
_CHAINS = st.lists(st.integers(0, 1), max_size=4)


def _hashes(chain):
    return chain_hashes(chain, block_size=1, seed=b"seed")


class LedgerMachine(RuleBasedStateMachine):
    """Holdings are lists of blocks, each with the chain its first blocks were written for."""

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger(_BLOCKS, 1)
        self.holdings = []  # one entry a reference-holding owner
        self.loading = {}
        self.promises = {}
        self.content = {}  # block -> chain prefix that was registered from it
        self.transfers = 0

    def room(self, ticket=None):
        used = {block for blocks in self.holdings for block in blocks}
        used.update(block for blocks in self.loading.values() for block in blocks)
        return _BLOCKS - len(used) - sum(self.promises.values()) + self.promises.get(ticket, 0)

    def draw(self, ticket, count):
        if ticket in self.promises:
            self.promises[ticket] -= min(count, self.promises[ticket])

    def hold(self, blocks, num_cached, chain):
        """Own blocks; whatever is not cached is written anew, for other content."""
        for index, block in enumerate(blocks):
            if index < num_cached:
                assert self.content[block] == tuple(chain[: index + 1]), "a hit on other content"
            else:
                self.content.pop(block, None)
        others = {block for held in self.holdings for block in held}
        assert not others & set(blocks[num_cached:]), "a block was given twice"
        if blocks:
            self.holdings.append(list(blocks))

    # ---- promises -------------------------------------------------------------------------------

    @rule(key=st.sampled_from(_KEYS), count=st.integers(0, 5))
    def promise(self, key, count):
        known = key in self.promises
        fits = count <= self.room()
        assert self.ledger.promise(key, count) == (known or fits)
        if fits and not known:
            self.promises[key] = count

    @rule(key=st.sampled_from(_KEYS))
    def forget(self, key):
        self.ledger.forget(key)
        self.promises.pop(key, None)

    # ---- taking ---------------------------------------------------------------------------------

    @rule(count=st.integers(0, 5), ticket=_TICKETS)
    def allocate(self, count, ticket):
        room = self.room(ticket)
        assert self.ledger.room(ticket=ticket) == room
        blocks = self.ledger.allocate(count, ticket=ticket)
        assert (blocks is None) == (count > room)
        if blocks is not None:
            assert len(blocks) == count
            self.draw(ticket, count)
            self.hold(blocks, 0, ())

    @rule(chain=_CHAINS, ticket=_TICKETS)
    def match(self, chain, ticket):
        run = self.ledger.peek(_hashes(chain))
        blocks = self.ledger.match(_hashes(chain), ticket=ticket)
        assert len(blocks) <= run
        self.draw(ticket, len(blocks))
        self.hold(blocks, len(blocks), chain)

    @rule(chain=_CHAINS, more=st.integers(0, 3), ticket=_TICKETS, spare=st.integers(0, 2))
    def acquire(self, chain, more, ticket, spare):
        run = self.ledger.peek(_hashes(chain))
        before = self.ledger.counts()
        acquired = self.ledger.acquire(
            len(chain) + more, _hashes(chain), ticket=ticket, spare_blocks=spare
        )
        if acquired is None:
            assert self.ledger.counts() == before
            assert len(chain) + more + spare > self.room(ticket)
            return
        blocks, num_cached = acquired
        assert (len(blocks), num_cached) == (len(chain) + more, run)
        self.draw(ticket, len(blocks))
        self.hold(blocks, num_cached, chain)

    @rule(count=st.integers(0, 3), ticket=st.sampled_from(_KEYS))
    def begin_loading(self, count, ticket):
        self.transfers += 1
        room = self.room(ticket)
        blocks = self.ledger.begin_loading(self.transfers, count, ticket=ticket)
        assert (blocks is None) == (count > room)
        if blocks is not None:
            self.draw(ticket, count)
            self.loading[self.transfers] = blocks
            for block in blocks:
                self.content.pop(block, None)

    # ---- ends -----------------------------------------------------------------------------------

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), commit=st.booleans())
    def end_loading(self, data, commit):
        transfer = data.draw(st.sampled_from(sorted(self.loading)))
        blocks = self.loading.pop(transfer)
        if commit:
            assert self.ledger.finish_loading(transfer) == blocks
            self.hold(blocks, 0, ())
        else:
            self.ledger.abort_loading(transfer)
            self.ledger.abort_loading(transfer)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.holdings))
        self.ledger.share(blocks)
        self.holdings.append(list(blocks))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        self.ledger.release(self.holdings.pop(index))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), chain=_CHAINS)
    def register(self, data, chain):
        """Register the leading private blocks of a holding as those of `chain`."""
        blocks = data.draw(st.sampled_from(self.holdings))
        hashes = _hashes(chain)
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=False)):
            if block in self.content:
                continue
            self.ledger.register(block, block_hash, hashes[index - 1] if index else None)
            if self.ledger._prefix.find(block_hash) == block:
                self.content[block] = tuple(chain[: index + 1])

    @invariant()
    def integrity(self):
        self.ledger.check_integrity()
        counts = self.ledger.counts()
        live = {block for blocks in self.holdings for block in blocks}
        assert counts.live == len(live)
        assert counts.loading == sum(map(len, self.loading.values()))
        assert counts.promised == sum(self.promises.values())
        assert counts.free + counts.live + counts.loading + counts.cached == counts.total

    def teardown(self):
        for blocks in self.holdings:
            self.ledger.release(blocks)
        for transfer in self.loading:
            self.ledger.abort_loading(transfer)
        for key in _KEYS:
            self.ledger.forget(key)
        self.ledger.check_integrity()
        counts = self.ledger.counts()
        assert counts.free + counts.cached == counts.total
        assert len(self.ledger.allocate(_BLOCKS)) == _BLOCKS


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
