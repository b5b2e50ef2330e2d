"""Which prompt tokens a prefill worker computes next.

First come, first served: a step has a budget of `chunk_tokens`, given to the prompts in order, so
that a short prompt fills what the last chunk of a long one leaves. All blocks of a prompt are
allocated before it starts, hence nothing is ever preempted. Its references end with `PromptDone`;
whoever hands the KV on holds its own. Pure and deterministic: the clock is an argument, and one
thread calls everything but the `num_*`, `waiting_tokens` and `is_idle` properties.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import ContextLengthError, LedgerError
from cluster.model.sequence import Sequence
from cluster.model.step import StepBatch, StepResult, StepSlice, finish_reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.kv.allocator import BlockLedger
    from cluster.types import AttemptKey, BlockId, FinishReason, GenerationJob


@dataclass(frozen=True, slots=True)
class Started:
    """A prompt got its blocks; those of the first `cached_tokens` tokens are complete already."""

    key: AttemptKey
    block_ids: tuple[BlockId, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """KV of the first `computed_tokens` tokens is in the pool; more chunks follow."""

    key: AttemptKey
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The whole prompt is in the pool and the next token is drawn; the scheduler let go of it."""

    key: AttemptKey
    token_id: int
    finish: FinishReason | None
    cached_tokens: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step, or None with the time at which waiting for a fuller one ends."""

    batch: StepBatch | None
    started: tuple[Started, ...]
    wake_at_s: float | None


class PrefillScheduler:
    """Owns the prompts of one prefill worker from `add` to `PromptDone` or `cancel`."""

    def __init__(
        self,
        ledger: BlockLedger,
        *,
        block_size: int,
        chunk_tokens: int,
        max_running: int,
        max_wait_s: float,
        seed_for: Callable[[str], bytes],
    ) -> None:
        """Start empty.

        Args:
            ledger: owner of the pool's blocks.
            block_size: tokens a block holds; must be the ledger's.
            chunk_tokens: most tokens a step computes.
            max_running: most prompts that hold blocks at once.
            max_wait_s: how long a job may wait for its step to fill; 0 never waits.
            seed_for: start of the hash chain for a cache salt.
        """
        if block_size != ledger.block_size:
            raise LedgerError(f"block size {block_size} is not the pool's {ledger.block_size}")
        self._ledger = ledger
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._max_wait_s = max_wait_s
        self._seed_for = seed_for
        # Invariant: every sequence is in exactly one of _waiting and _running.
        self._sequences: dict[AttemptKey, Sequence] = {}
        self._waiting: deque[Sequence] = deque()  # arrival order; they hold no blocks
        self._running: list[Sequence] = []  # arrival order; they hold all their blocks
        self._step: list[Sequence] = []  # aligned with the slices of the step under way

    @property
    def num_running(self) -> int:
        """Prompts that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Prompts that have not started."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens queued or still to be computed."""
        # The lists are copied first: another thread may read this while a step is planned.
        return sum(sequence.pending for sequence in [*self._waiting, *self._running])

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is left."""
        return not self._sequences

    def add(self, job: GenerationJob, now_s: float) -> None:
        """Queue a job.

        Raises:
            ContextLengthError: the pool is smaller than the prompt.
            LedgerError: the key is known already.
        """
        if job.key in self._sequences:
            raise LedgerError(f"{job.key} is scheduled already")
        seed = self._seed_for(job.cache_salt)
        sequence = Sequence(job, self._ledger, seed=seed, added_s=now_s)
        if sequence.num_blocks > self._ledger.num_blocks:
            raise ContextLengthError(
                f"{len(sequence.tokens)} tokens need {sequence.num_blocks} KV blocks;"
                f" the prefill worker has {self._ledger.num_blocks}"
            )
        self._sequences[job.key] = sequence
        self._waiting.append(sequence)

    def cancel(self, key: AttemptKey) -> bool:
        """Drop a job and free what it holds; False when the key is unknown."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        if sequence.holds_blocks:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.retire()
        return True

    def schedule(self, now_s: float) -> PrefillPlan:
        """Plan the next step.

        With no batch and no `wake_at_s` only a new job, or blocks freed elsewhere, can change
        anything.
        """
        if self._step:
            raise LedgerError("the step before is not complete")
        wake_at_s = self._fill_until_s(now_s)
        if wake_at_s is not None:
            return PrefillPlan(None, (), wake_at_s)
        slices: list[StepSlice] = []
        started: list[Started] = []
        budget_tokens = self._chunk_tokens
        index = 0
        while budget_tokens > 0:
            if index == len(self._running):
                opened = self._start_next()
                if opened is None:
                    break
                started.append(opened)
            sequence = self._running[index]
            piece = sequence.begin_step(budget_tokens, now_s)
            self._step.append(sequence)
            slices.append(piece)
            budget_tokens -= len(piece.token_ids)
            index += 1
        batch = StepBatch(tuple(slices)) if slices else None
        return PrefillPlan(batch, tuple(started), None)

    def complete(
        self, batch: StepBatch, result: StepResult, now_s: float
    ) -> tuple[Progress | PromptDone, ...]:
        """Account a finished step; `now_s` is when it finished."""
        step, self._step = self._step, []
        events: list[Progress | PromptDone] = []
        for sequence, piece, token_id in zip(step, batch.slices, result.token_ids, strict=True):
            if not sequence.end_step(piece):
                continue
            if piece.sample is None:
                events.append(Progress(sequence.key, sequence.computed))
                continue
            if token_id is None:
                raise LedgerError(f"the step drew no token for {sequence.key}")
            events.append(self._finish(sequence, token_id, now_s))
        return tuple(events)

    def check_integrity(self) -> None:
        """Raise LedgerError when the queues and the sequences disagree."""
        queued = [*self._waiting, *self._running]
        if sorted(map(id, queued)) != sorted(map(id, self._sequences.values())):
            raise LedgerError("a sequence is in no queue, or in two")
        if len(self._running) > self._max_running:
            raise LedgerError("too many prompts run")
        for sequence in queued:
            sequence.check_integrity()
        if any(sequence.holds_blocks for sequence in self._waiting):
            raise LedgerError("a waiting prompt holds blocks")
        if any(len(sequence.block_ids) != sequence.num_blocks for sequence in self._running):
            raise LedgerError("a running prompt lacks blocks")

    def _fill_until_s(self, now_s: float) -> float | None:
        """Return until when to wait for a fuller step; None: go now.

        Only whole steps wait: once a prompt is under way, nothing delays its next chunk.
        """
        if self._max_wait_s <= 0 or self._running or not self._waiting:
            return None
        full = len(self._waiting) >= self._max_running or self.waiting_tokens >= self._chunk_tokens
        until_s = self._waiting[0].added_s + self._max_wait_s
        return None if full or now_s >= until_s else until_s

    def _start_next(self) -> Started | None:
        """Give the first waiting prompt its blocks; None without one, a slot or room for it."""
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        sequence = self._waiting[0]
        if not sequence.start():
            return None
        self._running.append(self._waiting.popleft())
        return Started(sequence.key, tuple(sequence.block_ids), sequence.computed)

    def _finish(self, sequence: Sequence, token_id: int, now_s: float) -> PromptDone:
        """Let go of a computed prompt."""
        del self._sequences[sequence.key]
        self._running.remove(sequence)
        sequence.retire()
        started_s = now_s if sequence.started_s is None else sequence.started_s
        return PromptDone(
            key=sequence.key,
            token_id=token_id,
            finish=finish_reason(sequence.params, sequence.num_output + 1, token_id),
            cached_tokens=sequence.cached_tokens,
            queue_s=started_s - sequence.added_s,
            compute_s=now_s - started_s,
        )
