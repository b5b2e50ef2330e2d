"""The sending end of a link: which rows go next, announced first, then sent.

Several transfers share a link. The next frame belongs to a transfer whose prompt is finished
before one that still computes, and to the one served longest ago among equals. At most three
frames are announced and not yet sent. An announced frame is always sent, as an empty one when its
transfer was given up meanwhile, so giving up never harms the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import SessionClosedError
from cluster.kv.frames import FrameFlags, blocks_per_frame, frame_size, read_header, write_header
from cluster.kv.link import FrameJob, Link, LinkState
from cluster.kv.staging import NUM_SLOTS, RowAccess, Slot
from cluster.wire.messages import NextFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.kv.plane import Plane, Posted
    from cluster.kv.pool import KvPool
    from cluster.types import BlockId, TransferId
    from cluster.wire.session import Session


@dataclass(eq=False, slots=True)
class Outgoing:
    """One sequence on its way out. Blocks are counted within the sequence.

    ready_blocks <= len(rows), and first_block <= next_block once accepted: blocks before
    `first_block` are at the receiver already, even those that are not ready here yet.
    """

    transfer: TransferId
    rows: tuple[BlockId, ...] = ()
    ready_blocks: int = 0  # leading blocks whose KV is written
    is_complete: bool = False  # ready_blocks is final
    first_block: int | None = None  # from ACCEPT
    next_block: int = 0
    num_frames: int = 0  # announced
    last_turn: int = 0
    access: RowAccess = field(default_factory=RowAccess)

    def accept(self, first_block: int) -> None:
        """The receiver lacks everything from `first_block` on."""
        self.first_block = self.next_block = first_block

    @property
    def has_frame(self) -> bool:
        """Whether there are rows to send now."""
        return self.first_block is not None and self.next_block < self.ready_blocks

    @property
    def is_announced(self) -> bool:
        """Whether every frame there will ever be has been announced."""
        return (
            self.is_complete
            and self.first_block is not None
            and self.next_block >= self.ready_blocks
        )


class SendingLink(Link):
    """Drives the transfers of one (prefill, decode) pair."""

    def __init__(
        self,
        session: Session,
        epoch: int,
        plane: Plane,
        pool: KvPool,
        *,
        slot_bytes: int,
        checksum: bool,
        on_ready: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`slot_bytes` is the largest frame that both ends can hold."""
        super().__init__(
            session.peer.peer, epoch, plane, slot_bytes=slot_bytes, on_broken=on_broken
        )
        # Of rows, headers not counted. Counted when announced, so that the number is final when
        # ACK comes, which may overtake the I/O thread's own report.
        self.bytes_sent = 0
        self._on_ready = on_ready
        self._session = session
        self._pool = pool
        self._block_bytes = pool.layout.block_bytes
        self._frame_blocks = blocks_per_frame(slot_bytes, self._block_bytes)
        self._flags = FrameFlags.CHECKSUM if checksum else FrameFlags.NONE
        self._transfers: dict[Outgoing, Callable[[], None]] = {}
        self._turn = 0

    def add(self, transfer: Outgoing, on_announced: Callable[[], None]) -> None:
        """Serve `transfer` from now on; `on_announced` is called after its last NEXT."""
        self._transfers[transfer] = on_announced
        self.pump()

    def remove(self, transfer: Outgoing) -> None:
        """Announce nothing more of `transfer`; unknown ones are ignored."""
        self._transfers.pop(transfer, None)

    def pump(self) -> None:
        """Announce and queue what may go now; call it whenever a transfer's numbers changed."""
        try:
            while self.state is LinkState.READY and self.num_queued < NUM_SLOTS:
                waiting = [transfer for transfer in self._transfers if transfer.has_frame]
                if not waiting:
                    break
                self._announce(min(waiting, key=lambda t: (not t.is_complete, t.last_turn)))
        except SessionClosedError:
            return  # its `closed` report ends this link and every transfer
        for transfer in [transfer for transfer in self._transfers if transfer.is_announced]:
            self._transfers.pop(transfer)()  # its COMMIT

    def _announce(self, transfer: Outgoing) -> None:
        first = transfer.next_block
        num_blocks = min(transfer.ready_blocks - first, self._frame_blocks)
        announced = NextFrame(
            transfer=transfer.transfer,
            epoch=self.epoch,
            frame=transfer.num_frames,
            first_block=first,
            num_blocks=num_blocks,
            num_bytes=frame_size(num_blocks, self._block_bytes),
        )
        self._session.send(announced)
        self._queue(FrameJob(announced, transfer.rows[first : first + num_blocks], transfer.access))
        self.bytes_sent += num_blocks * self._block_bytes
        self._turn += 1
        transfer.last_turn = self._turn
        transfer.next_block += num_blocks
        transfer.num_frames += 1

    def _begin(self, job: FrameJob, slot: Slot) -> Posted:
        flags = self._flags
        if job.access.enter():
            try:
                self._pool.gather(job.rows, slot.rows(len(job.rows), self._block_bytes))
            finally:
                job.access.leave()
        else:
            flags |= FrameFlags.EMPTY
        num_bytes = job.announced.num_bytes
        write_header(slot.bytes[:num_bytes], job.announced, flags)
        return self._plane.post_send(slot.tensor[:num_bytes])

    def _finish(self, job: FrameJob, slot: Slot) -> bool:
        return FrameFlags.EMPTY not in read_header(slot.bytes).flags

    def _became_ready(self) -> None:
        self._on_ready()
        self.pump()

    def _frame_done(self, job: FrameJob, *, moved: bool) -> None:
        if not moved:
            self.bytes_sent -= job.announced.num_blocks * self._block_bytes
        self.pump()
