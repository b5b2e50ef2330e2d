"""Which sequences a decode worker advances next, and who gives way when blocks run out.

A step holds one row for every running sequence, then chunks of local prefill within
`chunk_tokens`. Sequences take blocks as they grow, from their own ticket first, then from
unpromised room. When there is none the youngest gives way: one that only waits loses its ticket,
one that holds blocks is preempted. That one keeps its tokens, is first in line again, and resumes
by computing prompt and output anew, so nothing it emitted repeats. The oldest is never preempted,
hence somebody always finishes. Pure and
deterministic: the clock is an argument, and one thread calls everything but the properties.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from cluster.errors import ContextLengthError, LedgerError
from cluster.kv.tickets import can_ever_fit
from cluster.model.step import StepBatch, StepResult, StepSlice, finish_reason
from decode.sequence import DecodeSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.kv.allocator import BlockLedger
    from cluster.types import AttemptKey, BlockId, FinishReason, GenerationJob, PhaseRecord

_age = attrgetter("age")


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One new token; `phases` come with the first and the last token of a sequence."""

    key: AttemptKey
    position: int  # output index
    token_id: int
    finish: FinishReason | None
    cached_tokens: int | None  # set once, when the prompt was computed here
    phases: tuple[PhaseRecord, ...]


class DecodeScheduler:
    """Owns the sequences of one decode worker from `attach` or `add_local` to their end."""

    def __init__(
        self,
        ledger: BlockLedger,
        *,
        block_size: int,
        chunk_tokens: int,
        max_running: int,
        seed_for: Callable[[str], bytes],
    ) -> None:
        """Start empty.

        Args:
            ledger: owner of the pool's blocks and of the tickets.
            block_size: tokens a block holds; must be the ledger's.
            chunk_tokens: most tokens of local prefill in a step.
            max_running: most sequences in a step.
            seed_for: start of the hash chain for a cache salt.
        """
        if block_size != ledger.block_size:
            raise LedgerError(f"block size {block_size} is not the pool's {ledger.block_size}")
        self._ledger = ledger
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._seed_for = seed_for
        # Invariant: every sequence is in exactly one of the three lists, each in order of age.
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._running: list[DecodeSequence] = []  # hold blocks
        self._waiting: list[DecodeSequence] = []  # new; attached ones hold blocks
        self._preempted: list[DecodeSequence] = []  # hold none
        self._step: list[DecodeSequence] = []  # aligned with the slices of the step under way
        self._arrivals = 0
        self._lacks_room = False  # the last plan left a sequence out for want of blocks
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, preempted ones included."""
        return len(self._waiting) + len(self._preempted)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to prefill here, queued or under way."""
        # The lists are copied first: another thread may read this while a step is planned.
        sequences = [*self._preempted, *self._waiting, *self._running]
        return sum(sequence.pending for sequence in sequences if sequence.in_prefill)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence waits for blocks to go on: no new tickets until it has them."""
        return bool(self._preempted) or self._lacks_room

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left."""
        return not self._sequences

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._num_preemptions

    def attach(
        self, job: GenerationJob, block_ids: Sequence[BlockId], first_token: int, now_s: float
    ) -> None:
        """Take over a sequence whose prompt KV is in `block_ids`, references included.

        The first token was already delivered; a sequence that ends with it is dropped at once.

        Raises:
            ContextLengthError: the pool can never carry the job to its end.
            LedgerError: the key is known already, or blocks are missing.
        """
        if finish_reason(job.sampling, len(job.forced_token_ids) + 1, first_token) is not None:
            self._ledger.release(block_ids)
            self._ledger.forget(job.key)
            return
        sequence = self._new(job, now_s, attached=True)
        sequence.adopt(list(block_ids))
        sequence.tokens.append(first_token)
        self._enqueue(sequence)

    def add_local(self, job: GenerationJob, now_s: float) -> None:
        """Queue a job to be prefilled here; its ticket is promised under its key.

        Raises:
            ContextLengthError: the pool can never carry the job to its end.
            LedgerError: the key is known already.
        """
        self._enqueue(self._new(job, now_s, attached=False))

    def cancel(self, key: AttemptKey) -> bool:
        """Drop a sequence and free what it holds; False when the key is unknown."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        for queue in (self._running, self._waiting, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
        self._drop(sequence)
        return True

    def schedule(self, now_s: float) -> StepBatch | None:
        """Plan the next step.

        None while not idle means that all room is promised or loading elsewhere: call again
        once a ticket or a transfer has ended.
        """
        if self._step:
            raise LedgerError("the step before is not complete")
        preemptions = self._num_preemptions
        batch = self._plan(now_s)
        if batch is None and self._num_preemptions > preemptions:
            batch = self._plan(now_s)  # whoever was in the way is not any more
        return batch

    def complete(self, batch: StepBatch, result: StepResult, now_s: float) -> tuple[TokenOut, ...]:
        """Account a finished step; `now_s` is when it finished."""
        step, self._step = self._step, []
        outputs: list[TokenOut] = []
        ended = False
        for sequence, piece, token_id in zip(step, batch.slices, result.token_ids, strict=True):
            if not sequence.end_step(piece) or piece.sample is None:
                continue
            if token_id is None:
                raise LedgerError(f"the step drew no token for {sequence.key}")
            output = self._emit(sequence, token_id, now_s)
            outputs.append(output)
            if output.finish is not None:
                self._drop(sequence)
                ended = True
        if ended:
            self._running = [sequence for sequence in self._running if not sequence.retired]
        return tuple(outputs)

    def check_integrity(self) -> None:
        """Raise LedgerError when the queues and the sequences disagree."""
        queues = (self._running, self._waiting, self._preempted)
        queued = [sequence for queue in queues for sequence in queue]
        if sorted(map(id, queued)) != sorted(map(id, self._sequences.values())):
            raise LedgerError("a sequence is in no queue, or in two")
        if any(queue != sorted(queue, key=_age) for queue in queues):
            raise LedgerError("a queue is not in order of age")
        if len(self._running) > self._max_running:
            raise LedgerError("too many sequences run")
        for sequence in queued:
            sequence.check_integrity()
            if sequence.holds_blocks and not sequence.in_prefill and sequence.pending != 1:
                raise LedgerError(f"{sequence.key} decodes with {sequence.pending} tokens pending")
        if not all(sequence.holds_blocks for sequence in self._running):
            raise LedgerError("a running sequence holds no blocks")
        if any(sequence.holds_blocks for sequence in self._preempted):
            raise LedgerError("a preempted sequence holds blocks")

    # ---- coming and going -----------------------------------------------------------------------

    def _new(self, job: GenerationJob, now_s: float, *, attached: bool) -> DecodeSequence:
        """Make a sequence that is younger than all others."""
        if job.key in self._sequences:
            raise LedgerError(f"{job.key} is scheduled already")
        if not can_ever_fit(job, self._ledger.num_blocks, self._ledger.block_size):
            raise ContextLengthError(
                f"{job.total_tokens} tokens exceed the {self._ledger.num_blocks} KV blocks of"
                f" {self._ledger.block_size} tokens of the decode worker"
            )
        self._arrivals += 1
        return DecodeSequence(
            job,
            self._ledger,
            seed=self._seed_for(job.cache_salt),
            added_s=now_s,
            age=self._arrivals,
            attached=attached,
        )

    def _enqueue(self, sequence: DecodeSequence) -> None:
        """Put a new sequence last."""
        self._sequences[sequence.key] = sequence
        self._waiting.append(sequence)

    def _drop(self, sequence: DecodeSequence) -> None:
        """End a sequence: its blocks and what remains of its ticket go back."""
        del self._sequences[sequence.key]
        sequence.retire()
        self._ledger.forget(sequence.key)
        self._lacks_room = False  # whoever lacked room is to be tried again

    def _emit(self, sequence: DecodeSequence, token_id: int, now_s: float) -> TokenOut:
        """Append a drawn token and describe it."""
        position = sequence.num_output
        finish = finish_reason(sequence.params, position + 1, token_id)
        sequence.in_prefill = False
        cached_tokens = None
        phases: tuple[PhaseRecord, ...] = ()
        if sequence.decoding_since_s is None:
            phases = sequence.first_phases(now_s)
            cached_tokens = None if sequence.attached else sequence.cached_tokens
        if finish is not None:
            phases += (sequence.last_phase(now_s),)
        sequence.tokens.append(token_id)
        return TokenOut(sequence.key, position, token_id, finish, cached_tokens, phases)

    # ---- planning -------------------------------------------------------------------------------

    def _plan(self, now_s: float) -> StepBatch | None:
        """Admit, grow or preempt, and cut the slices of one step."""
        self._lacks_room = False
        self._admit()
        slices: list[StepSlice] = []
        for sequence in self._growing():
            slices.append(sequence.begin_step(1, now_s))
            self._step.append(sequence)
        budget_tokens = self._chunk_tokens
        for sequence in self._running:
            if budget_tokens <= 0:
                break
            if sequence.in_prefill:
                piece = sequence.begin_step(budget_tokens, now_s)
                budget_tokens -= len(piece.token_ids)
                slices.append(piece)
                self._step.append(sequence)
        return StepBatch(tuple(slices)) if slices else None

    def _admit(self) -> None:
        """Let sequences run, preempted ones first, then in order of arrival.

        Once one lacks room, only those pass it that take none: they hold their blocks already, or
        a ticket covers all they need. Otherwise what they wait for could be held by each other.
        """
        for queue in (self._preempted, self._waiting):
            if len(self._running) >= self._max_running:
                return
            left: list[DecodeSequence] = []
            for sequence in queue:
                if len(self._running) < self._max_running and self._start(sequence):
                    insort(self._running, sequence, key=_age)
                else:
                    left.append(sequence)
            queue[:] = left

    def _start(self, sequence: DecodeSequence) -> bool:
        """Give a sequence its blocks; False, and `_lacks_room`, when there are too few."""
        if sequence.holds_blocks:
            return True
        covered = self._ledger.promised(sequence.key) >= sequence.num_blocks
        if self._lacks_room and not covered:
            return False
        # Unpromised room must also leave a block for each running sequence to grow into, or the
        # newcomer would be preempted before it has computed anything.
        spare_blocks = 0 if covered else len(self._running)
        if not sequence.start(ticket=sequence.key, spare_blocks=spare_blocks):
            # A ticket that does not suffice only keeps room from those that could use it.
            self._ledger.forget(sequence.key)
            self._lacks_room = True
            return False
        sequence.in_prefill = True
        return True

    def _growing(self) -> list[DecodeSequence]:
        """Return the sequences to decode, each with a block for its next token.

        Oldest first, so that a victim is never one that has been returned.
        """
        ready: list[DecodeSequence] = []
        for sequence in list(self._running):
            if sequence.in_prefill or not sequence.holds_blocks:
                continue
            if self._make_room(sequence):
                ready.append(sequence)
        return ready

    def _make_room(self, sequence: DecodeSequence) -> bool:
        """Grow a sequence at the cost of younger ones; False when it cannot run now."""
        while not sequence.grow():
            victim = self._youngest()
            if victim is None:
                self._lacks_room = True
                return False
            if victim.holds_blocks:
                self._preempt(victim)
            else:
                self._ledger.forget(victim.key)
            if victim is sequence:
                return False
        return True

    def _youngest(self) -> DecodeSequence | None:
        """Return the youngest sequence with blocks or a ticket, None when it is also the oldest."""
        holders = [*self._running, *(each for each in self._waiting if self._has_claim(each))]
        return max(holders, key=_age) if len(holders) > 1 else None

    def _has_claim(self, sequence: DecodeSequence) -> bool:
        """Whether a waiting sequence keeps room from others."""
        return sequence.holds_blocks or self._ledger.promised(sequence.key) > 0

    def _preempt(self, sequence: DecodeSequence) -> None:
        """Take a sequence's blocks and ticket; it keeps its tokens and comes back first."""
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        sequence.free()
        sequence.in_prefill = True
        self._ledger.forget(sequence.key)
        insort(self._preempted, sequence, key=_age)
        self._num_preemptions += 1
