"""A sequence of the decode scheduler: how it came, its age, and the phases it reports.

The first output that leaves here carries how long the sequence waited (and, prefilled here, how
long that took); the last one how long decoding took. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.model.sequence import Sequence
from cluster.types import PhaseRecord

if TYPE_CHECKING:
    from cluster.kv.allocator import BlockLedger
    from cluster.types import GenerationJob


class DecodeSequence(Sequence):
    """One attempt on a decode worker."""

    __slots__ = ("age", "attached", "decoding_since_s", "in_prefill")

    def __init__(
        self,
        job: GenerationJob,
        ledger: BlockLedger,
        *,
        seed: bytes,
        added_s: float,
        age: int,
        attached: bool,
    ) -> None:
        """Start without blocks.

        Args:
            job: what to generate.
            ledger: owner of the blocks.
            seed: start of the hash chain.
            added_s: when the job came in.
            age: place in the order of arrival, kept over preemptions; smaller is older.
            attached: the prompt's KV came from a prefill worker.
        """
        super().__init__(job, ledger, seed=seed, added_s=added_s)
        self.age = age
        self.attached = attached
        self.in_prefill = not attached  # KV before the last token is still to be computed
        self.decoding_since_s: float | None = None  # None until its first output

    def first_phases(self, now_s: float) -> tuple[PhaseRecord, ...]:
        """Note that the first output left at `now_s`, and return what came before it."""
        started_s = now_s if self.started_s is None else self.started_s
        ran_s = now_s - started_s
        queue_s = started_s - self.added_s
        if self.attached:
            self.decoding_since_s = started_s
            return (PhaseRecord("decode.queue", ran_s, queue_s),)
        self.decoding_since_s = now_s
        return (
            PhaseRecord("prefill.queue", ran_s, queue_s),
            PhaseRecord("prefill.compute", 0.0, ran_s),
        )

    def last_phase(self, now_s: float) -> PhaseRecord:
        """Return the decode phase that ends with the output of `now_s`."""
        since_s = now_s if self.decoding_since_s is None else self.decoding_since_s
        return PhaseRecord("decode", 0.0, now_s - since_s)
