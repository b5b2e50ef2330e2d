"""Tickets: what a decode worker has promised before any prefill compute is spent.

A ticket is a job and a counted promise of blocks in the ledger. It ends by being taken (a transfer
or a local prefill starts), cancelled, expired or dropped with the session that asked for it.
Repeating a reservation changes nothing; attempts that are over, or lower than the highest seen,
are refused. Pure: the clock is passed in, ids of sessions are any hashable value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.attempts import AttemptBook, Verdict
from cluster.kv.tickets import can_ever_fit, ticket_blocks
from cluster.wire.messages import Refused, Reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from cluster.kv.allocator import BlockLedger
    from cluster.types import AttemptKey, GenerationJob

_RETRY_AFTER_S = 0.2  # some running request usually ends within a few steps


@dataclass(slots=True)
class _Ticket:
    job: GenerationJob
    session: Hashable
    num_blocks: int
    expires_s: float  # monotonic
    is_taken: bool = False


class TicketBook:
    """All tickets of one decode worker, by (request, attempt)."""

    def __init__(self, ledger: BlockLedger, *, block_size: int, tombstone_s: float = 60.0) -> None:
        """Promises are made in `ledger`; tombstones last `tombstone_s` and are bounded."""
        self._ledger = ledger
        self._block_size = block_size
        self._attempts = AttemptBook(ttl_s=tombstone_s)
        self._tickets: dict[AttemptKey, _Ticket] = {}  # taken ones too, until cancelled

    def __len__(self) -> int:
        """Tickets that still wait to be taken."""
        return sum(not ticket.is_taken for ticket in self._tickets.values())

    def reserve(self, session: Hashable, job: GenerationJob, now_s: float) -> Reserved | Refused:
        """Promise room for `job`, or say why not and when to ask again (None: never)."""
        known = self._tickets.get(job.key)
        if known is not None:
            return Reserved(job.key, known.num_blocks)
        if not can_ever_fit(job, self._ledger.num_blocks, self._block_size):
            reason = (
                f"{job.total_tokens} tokens exceed the pool of {self._ledger.num_blocks} blocks"
            )
            return Refused(job.key, "context_length_exceeded", reason, None)
        context_tokens = len(job.prompt_token_ids) + len(job.forced_token_ids)
        output_tokens = job.sampling.max_tokens - len(job.forced_token_ids)
        num_blocks = ticket_blocks(context_tokens, output_tokens, self._block_size)
        if not self._ledger.promise(job.key, num_blocks):
            reason = f"no room for {num_blocks} blocks"
            return Refused(job.key, "overloaded", reason, _RETRY_AFTER_S)
        verdict = self._attempts.admit(job.key, now_s)
        if verdict is not Verdict.NEW:
            self._ledger.forget(job.key)
            reason = f"attempt {job.key.attempt} is {verdict.value}"
            return Refused(job.key, "stale_attempt", reason, None)
        self._tickets[job.key] = _Ticket(job, session, num_blocks, now_s + job.deadline_s)
        return Reserved(job.key, num_blocks)

    def find(self, key: AttemptKey) -> GenerationJob | None:
        """The job of a ticket that waits to be taken."""
        ticket = self._tickets.get(key)
        return None if ticket is None or ticket.is_taken else ticket.job

    def take(self, key: AttemptKey) -> GenerationJob | None:
        """Use the ticket: whoever calls owns the promise in the ledger from now on."""
        job = self.find(key)
        if job is not None:
            self._tickets[key].is_taken = True
        return job

    def cancel(self, key: AttemptKey, now_s: float) -> None:
        """The attempt is over, known here or not; repeats of it are refused for a while.

        An untaken ticket's promise is dropped; a taken one's belongs to its taker.
        """
        ticket = self._tickets.pop(key, None)
        if ticket is not None and not ticket.is_taken:
            self._ledger.forget(key)
        self._attempts.close(key, now_s)

    def expire(self, now_s: float) -> tuple[AttemptKey, ...]:
        """Cancel untaken tickets whose job's deadline has passed."""
        return self._cancel_where(lambda ticket: ticket.expires_s <= now_s, now_s)

    def drop_session(self, session: Hashable, now_s: float) -> tuple[AttemptKey, ...]:
        """Cancel the untaken tickets of a session that is gone."""
        return self._cancel_where(lambda ticket: ticket.session == session, now_s)

    def _cancel_where(
        self, condition: Callable[[_Ticket], bool], now_s: float
    ) -> tuple[AttemptKey, ...]:
        keys = tuple(
            key
            for key, ticket in self._tickets.items()
            if not ticket.is_taken and condition(ticket)
        )
        for key in keys:
            self.cancel(key, now_s)
        return keys
