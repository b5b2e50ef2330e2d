"""The receiving end of a link: every announced frame is received, then scattered or dropped.

Receives are posted strictly in the order of announcement and of exactly the announced size. A
frame that is not the announced one breaks the link; a frame of a transfer that was given up is
received into the ring and dropped there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import WireError
from cluster.kv.frames import FrameFlags, frame_size, verify_frame
from cluster.kv.link import FrameJob, Link
from cluster.kv.staging import NUM_SLOTS, RowAccess, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.kv.plane import Plane, Posted
    from cluster.kv.pool import KvPool
    from cluster.types import BlockId
    from cluster.wire.messages import NextFrame

# A sender keeps three frames announced; as many again may wait here for a slot.
_MAX_QUEUED = 4 * NUM_SLOTS


class ReceivingLink(Link):
    """Receives the frames of one (prefill, decode) pair into the pool."""

    def __init__(
        self,
        name: str,
        epoch: int,
        plane: Plane,
        pool: KvPool,
        *,
        slot_bytes: int,
        on_frame: Callable[[NextFrame, bool], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_frame` hears, on the event loop, of each frame and whether its rows were written."""
        super().__init__(name, epoch, plane, slot_bytes=slot_bytes, on_broken=on_broken)
        self.bytes_received = 0  # of rows that were written; headers not counted
        self._pool = pool
        self._block_bytes = pool.layout.block_bytes
        self._on_frame = on_frame

    def expect(
        self, announced: NextFrame, rows: Sequence[BlockId], access: RowAccess | None
    ) -> None:
        """Receive an announced frame into `rows`; with `access` None it is dropped.

        Raises:
            WireError: Its size is not what its blocks need, does not fit a slot, or too many
                frames are announced already. The caller must end the session.
        """
        size = frame_size(announced.num_blocks, self._block_bytes)
        if announced.num_blocks < 1 or announced.num_bytes != size or size > self._slot_bytes:
            raise WireError(
                f"frame of {announced.num_blocks} blocks announced with {announced.num_bytes} "
                f"bytes; {size} are needed and {self._slot_bytes} fit"
            )
        if self.num_queued >= _MAX_QUEUED:
            raise WireError(f"{self.num_queued} frames are announced already")
        keep = () if access is None else tuple(rows)
        self._queue(FrameJob(announced, keep, access or RowAccess()))

    def _begin(self, job: FrameJob, slot: Slot) -> Posted:
        return self._plane.post_recv(slot.tensor[: job.announced.num_bytes])

    def _finish(self, job: FrameJob, slot: Slot) -> bool:
        header = verify_frame(slot.bytes[: job.announced.num_bytes], job.announced)
        if FrameFlags.EMPTY in header.flags or not job.rows or not job.access.enter():
            return False
        try:
            self._pool.scatter(job.rows, slot.rows(len(job.rows), self._block_bytes))
        finally:
            job.access.leave()
        return True

    def _became_ready(self) -> None:
        """Announcements that came early are queued already."""

    def _frame_done(self, job: FrameJob, *, moved: bool) -> None:
        if moved:
            self.bytes_received += job.announced.num_blocks * self._block_bytes
        self._on_frame(job.announced, moved)
