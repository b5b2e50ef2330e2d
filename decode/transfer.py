"""One transfer as the decode worker sees it: what was promised, what arrived, what is proven.

A transfer's blocks belong to nobody else until COMMIT verifies against what was actually received.
Pure bookkeeping: no session, no link, no ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import HandoffError, WireError
from cluster.kv.staging import RowAccess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.types import BlockHash, BlockId, GenerationJob, TransferId
    from cluster.wire.messages import Commit, NextFrame


@dataclass(eq=False, slots=True)
class IncomingTransfer:
    """An accepted transfer. `prefix_rows` came from our own cache, `rows` are being loaded."""

    transfer: TransferId
    job: GenerationJob
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]  # of the full blocks, chain order
    prefix_rows: tuple[BlockId, ...]
    rows: tuple[BlockId, ...]
    access: RowAccess = field(default_factory=RowAccess)
    num_announced: int = 0  # frames
    next_block: int = 0  # within `rows`: the first not announced
    num_arrived: int = 0  # frames verified and scattered; <= num_announced
    arrived_blocks: int = 0
    started_s: float | None = None  # monotonic, when the first frame was announced
    commit: Commit | None = None

    def announce(self, frame: NextFrame, now_s: float) -> Sequence[BlockId]:
        """Return the rows of the next frame.

        Raises:
            WireError: It is not the next frame, or reaches beyond the transfer.
        """
        first = len(self.prefix_rows) + self.next_block
        end = self.next_block + frame.num_blocks
        if frame.frame != self.num_announced or frame.first_block != first or end > len(self.rows):
            raise WireError(
                f"frame {frame.frame} with blocks {frame.first_block}+{frame.num_blocks} came "
                f"where frame {self.num_announced} at block {first} was due"
            )
        rows = self.rows[self.next_block : end]
        self.next_block = end
        self.num_announced += 1
        if self.started_s is None:
            self.started_s = now_s
        return rows

    def arrived(self, frame: NextFrame) -> None:
        """A frame's rows are written."""
        self.num_arrived += 1
        self.arrived_blocks += frame.num_blocks

    @property
    def is_settled(self) -> bool:
        """Whether COMMIT is here and no announced frame is still under way."""
        return self.commit is not None and self.num_arrived == self.num_announced

    def verify(self) -> None:
        """Check COMMIT's manifest against what arrived.

        Raises:
            HandoffError: Names the number that differs.
        """
        commit = self.commit
        assert commit is not None
        expected = (
            ("key", commit.key, self.job.key),
            ("key of token 1", commit.first_output.key, self.job.key),
            ("tokens", commit.num_tokens, self.num_tokens),
            ("frames", commit.num_frames, self.num_arrived),
            ("blocks", commit.num_blocks, self.arrived_blocks),
            ("blocks needed", self.arrived_blocks, len(self.rows)),
            ("output tokens", len(commit.first_output.token_ids), 1),
        )
        for what, got, wanted in expected:
            if got != wanted:
                raise HandoffError(f"commit does not verify: {what} {got}, expected {wanted}")
