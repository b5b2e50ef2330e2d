"""One attempt inside an engine: its tokens, its block table, and how much KV is written.

Both schedulers build on it, so that prefix hits, chunks, growth and registration follow one set
of rules. It holds references on blocks but decides nothing about when to run. Ownership of the
positions of a sequence:

    0 .. computed-1          KV written; full blocks are registered and never written again
    computed .. len(tokens)  known tokens whose KV the next slices write
    len(tokens)              the token a slice that reaches the end will sample

Pure: the ledger is the only thing it touches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import LedgerError
from cluster.kv.hashing import extend_chain, prompt_digest
from cluster.kv.tickets import blocks_for
from cluster.model.step import SampleSpec, StepSlice

if TYPE_CHECKING:
    from cluster.kv.allocator import BlockLedger
    from cluster.types import AttemptKey, BlockHash, BlockId, GenerationJob


class Sequence:
    """Tokens and blocks of one attempt. Costs per step depend on new tokens, not on length."""

    __slots__ = (
        "_digest",
        "_hashes",
        "_ledger",
        "_seed",
        "_table",
        "added_s",
        "block_ids",
        "cached_tokens",
        "computed",
        "in_step",
        "key",
        "num_prompt",
        "params",
        "retired",
        "started_s",
        "tokens",
    )

    def __init__(
        self, job: GenerationJob, ledger: BlockLedger, *, seed: bytes, added_s: float
    ) -> None:
        """Hold no blocks yet; output of earlier attempts counts as generated already.

        Args:
            job: what to generate.
            ledger: owner of the blocks.
            seed: start of the hash chain, see `chain_seed`.
            added_s: when the job came in, on the scheduler's clock.
        """
        if not job.prompt_token_ids:
            raise LedgerError(f"{job.key} has no prompt tokens to compute")
        self.key: AttemptKey = job.key
        self.params = job.sampling
        self.num_prompt = len(job.prompt_token_ids)
        self.tokens: list[int] = [*job.prompt_token_ids, *job.forced_token_ids]
        self.computed = 0
        self.block_ids: list[BlockId] = []
        self.cached_tokens = 0  # prompt tokens the first start took from the cache
        self.added_s = added_s
        self.started_s: float | None = None  # beginning of its first step
        self.in_step = False  # a step that names its blocks is under way
        self.retired = False  # ended or cancelled; blocks go back once `in_step` is over
        self._ledger = ledger
        self._seed = seed
        self._hashes: list[BlockHash] = []  # of the leading full blocks, as far as needed so far
        self._digest = prompt_digest(job.prompt_token_ids)
        self._table: tuple[BlockId, ...] = ()  # block_ids as a tuple, rebuilt when they change

    @property
    def num_output(self) -> int:
        """Output tokens that exist; the output index of the next one to sample."""
        return len(self.tokens) - self.num_prompt

    @property
    def pending(self) -> int:
        """Known tokens whose KV is not written yet."""
        return len(self.tokens) - self.computed

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all known tokens."""
        return blocks_for(len(self.tokens), self._ledger.block_size)

    @property
    def holds_blocks(self) -> bool:
        """Whether it owns rows of the pool."""
        return bool(self.block_ids)

    # ---- blocks ---------------------------------------------------------------------------------

    def start(self, *, ticket: AttemptKey | None = None, spare_blocks: int = 0) -> bool:
        """Take blocks for all known tokens, cached ones first; False when there is no room.

        A hit is capped so that at least one token is left to compute: its logits are needed.
        """
        cap = (len(self.tokens) - 1) // self._ledger.block_size
        acquired = self._ledger.acquire(
            self.num_blocks,
            self._chain(cap) if self._ledger.prefix_cache else (),
            ticket=ticket,
            spare_blocks=spare_blocks,
        )
        if acquired is None:
            return False
        blocks, num_cached = acquired
        self._set_blocks(blocks)
        self.computed = num_cached * self._ledger.block_size
        if self.started_s is None:
            self.cached_tokens = min(self.computed, self.num_prompt - 1)
        return True

    def adopt(self, block_ids: list[BlockId]) -> None:
        """Take over references on blocks that hold the KV of all known tokens."""
        if len(block_ids) < self.num_blocks:
            raise LedgerError(f"{self.key} needs {self.num_blocks} blocks, got {len(block_ids)}")
        self._set_blocks(block_ids)
        self.advance(len(self.tokens))

    def grow(self) -> bool:
        """Own a block for every known token, drawing on its ticket first; False without room."""
        missing = self.num_blocks - len(self.block_ids)
        if missing <= 0:
            return True
        more = self._ledger.allocate(missing, ticket=self.key)
        if more is None:
            return False
        self._set_blocks(self.block_ids + more)
        return True

    def free(self) -> None:
        """Give all blocks back and forget that their KV was written; tokens stay."""
        self._ledger.release(self.block_ids)
        self._set_blocks([])
        self.computed = 0

    def retire(self) -> None:
        """Free for good, now or, while a step still names its blocks, at the end of that step."""
        self.retired = True
        if not self.in_step:
            self.free()

    # ---- steps ----------------------------------------------------------------------------------

    def begin_step(self, max_tokens: int, now_s: float) -> StepSlice:
        """Return the next slice, of at most `max_tokens` pending tokens."""
        self.in_step = True
        if self.started_s is None:
            self.started_s = now_s
        start = self.computed
        end = min(start + max_tokens, len(self.tokens))
        sample = None
        if end == len(self.tokens):
            sample = SampleSpec(self.params, self.num_output, self._digest)
        table = self._table
        num_blocks = blocks_for(end, self._ledger.block_size)
        if num_blocks != len(table):
            table = table[:num_blocks]
        return StepSlice(self.key, tuple(self.tokens[start:end]), start, table, sample)

    def end_step(self, piece: StepSlice) -> bool:
        """Account the KV that `piece` wrote; False when the sequence was retired meanwhile."""
        self.in_step = False
        if self.retired:
            self.free()
            return False
        self.advance(len(piece.token_ids))
        return True

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as written and register the blocks they filled."""
        first = self.computed // self._ledger.block_size
        self.computed += num_tokens
        end = self.computed // self._ledger.block_size
        if first == end or not self._ledger.prefix_cache:
            return
        hashes = self._chain(end)
        for index in range(first, end):
            parent = hashes[index - 1] if index else None
            self._ledger.register(self.block_ids[index], hashes[index], parent)

    def check_integrity(self) -> None:
        """Raise LedgerError when tokens, blocks and written KV do not fit together."""
        if not 0 <= self.computed <= len(self.tokens):
            raise LedgerError(
                f"{self.key} has {self.computed} of {len(self.tokens)} tokens written"
            )
        if len(self.block_ids) * self._ledger.block_size < self.computed:
            raise LedgerError(f"{self.key} has KV outside its {len(self.block_ids)} blocks")
        if len(set(self.block_ids)) != len(self.block_ids):
            raise LedgerError(f"{self.key} names a block twice")
        if self._table != tuple(self.block_ids):
            raise LedgerError(f"{self.key} has a stale block table")

    # ---- inside ---------------------------------------------------------------------------------

    def _set_blocks(self, block_ids: list[BlockId]) -> None:
        """Replace the block table in both of its forms."""
        self.block_ids = block_ids
        self._table = tuple(block_ids)

    def _chain(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` full blocks, computing only missing ones."""
        size = self._ledger.block_size
        for index in range(len(self._hashes), num_blocks):
            parent = self._hashes[-1] if self._hashes else self._seed
            block = self.tokens[index * size : (index + 1) * size]
            self._hashes.append(extend_chain(parent, block))
        return self._hashes[:num_blocks]
