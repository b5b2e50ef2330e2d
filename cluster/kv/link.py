"""A link: the data plane between one prefill and one decode worker, and its I/O thread.

    CONNECTING -> READY -> DRAINING -> CLOSED        and BROKEN from any of the first three

Owns one plane, one ring of staging slots and one thread that makes every blocking call. Promises:
frames complete in the order they were queued; the first error or deadline ends the link for good
(BROKEN) and nobody ever waits for the thread, which ends by its own frame deadline and drops the
ring. `outgoing.py` and `incoming.py` say what a frame's beginning and end mean on each side.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import HandoffError
from cluster.kv.staging import RowAccess, Slot, StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.kv.plane import Plane, Posted
    from cluster.types import BlockId
    from cluster.wire.messages import NextFrame

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FRAME_TIMEOUT_S = 5.0
_SPEED_MEMORY = 0.9  # what an older frame counts beside the next one


class LinkState(StrEnum):
    """Life of a link."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSED = "closed"


_OVER = (LinkState.BROKEN, LinkState.CLOSED)


@dataclass(frozen=True, slots=True)
class FrameJob:
    """One announced frame and the rows it reads or writes."""

    announced: NextFrame
    rows: tuple[BlockId, ...]  # empty when the frame is to be dropped
    access: RowAccess


@dataclass(slots=True)
class _InFlight:
    job: FrameJob
    slot: Slot
    posted: Posted
    posted_s: float


class Link(ABC):
    """Common part of both ends. Methods belong to the event loop unless they say otherwise."""

    def __init__(
        self,
        name: str,
        epoch: int,
        plane: Plane,
        *,
        slot_bytes: int,
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_broken` is told the reason once, on the event loop, unless `close` or `fail` came."""
        self.name = name
        self.epoch = epoch
        self.state = LinkState.CONNECTING
        self.num_queued = 0  # frames queued and not yet reported
        self.ended = asyncio.Event()  # the I/O thread is gone
        self._plane = plane
        self._slot_bytes = slot_bytes
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[FrameJob | None] = SimpleQueue()
        self._halted = False  # read by the I/O thread: stop after the current wait
        self._last_done_s = 0.0
        self._recent_bytes = 0.0
        self._recent_s = 0.0  # of the plane being busy with them, waits in between not counted
        self._thread = threading.Thread(target=self._run, name=f"link-{name}", daemon=True)

    @property
    def gb_per_s(self) -> float | None:
        """Speed of recent frames; None before the first."""
        return self._recent_bytes / self._recent_s / 1e9 if self._recent_s > 0 else None

    def open(self) -> None:
        """Start connecting."""
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Give the link up now, without waiting for its thread."""
        if self.state not in _OVER:
            _log.info("link %s broke: %s", self.name, reason)
            self._halt(LinkState.BROKEN)

    def close(self) -> None:
        """Finish the frames already queued, then end."""
        if self.state is LinkState.CONNECTING:
            self._halt(LinkState.CLOSED)
        elif self.state is LinkState.READY:
            self.state = LinkState.DRAINING
            self._jobs.put(None)

    def _queue(self, job: FrameJob) -> None:
        self.num_queued += 1
        self._jobs.put(job)

    def _halt(self, state: LinkState) -> None:
        self.state = state
        self._halted = True
        self._jobs.put(None)

    # ---- reports of the I/O thread, run on the event loop ---------------------------------------

    def _connected(self) -> None:
        if self.state is LinkState.CONNECTING:
            self.state = LinkState.READY
            self._became_ready()

    def _done(self, job: FrameJob, *, moved: bool, seconds: float) -> None:
        self.num_queued -= 1
        if self.state in _OVER:
            return
        self._recent_bytes = _SPEED_MEMORY * self._recent_bytes + job.announced.num_bytes
        self._recent_s = _SPEED_MEMORY * self._recent_s + seconds
        self._frame_done(job, moved=moved)

    def _ended(self, error: str | None) -> None:
        self.ended.set()
        if self.state not in _OVER:
            if error is None:
                self._halt(LinkState.CLOSED)
            else:
                self.fail(error)
                self._on_broken(error)

    # ---- the I/O thread -------------------------------------------------------------------------

    def _run(self) -> None:
        error: str | None = None
        in_flight: deque[_InFlight] = deque()
        try:
            ring = StagingRing(self._slot_bytes)
            self._plane.connect(CONNECT_TIMEOUT_S)
            self._tell(self._connected)
            self._serve(ring, in_flight)
        except HandoffError as failure:
            error = failure.message
        except Exception as failure:  # noqa: BLE001 - logged; the link is torn down
            _log.exception("link %s: its I/O thread failed", self.name)
            error = f"internal error: {failure}"
        self._plane.close()
        in_flight.clear()  # only now: the plane may have been writing into their slots
        self._tell(lambda: self._ended(error))

    def _serve(self, ring: StagingRing, in_flight: deque[_InFlight]) -> None:
        """Keep as many frames posted as there are slots; complete them in order."""
        more = True
        while not self._halted and (more or in_flight):
            more = self._begin_queued(ring, in_flight, more=more)
            if not in_flight:
                continue
            oldest = in_flight[0]
            oldest.posted.wait(FRAME_TIMEOUT_S)
            in_flight.popleft()
            done_s = monotonic_s()
            seconds = done_s - max(oldest.posted_s, self._last_done_s)
            self._last_done_s = done_s
            if more and not self._halted:  # post the next before spending time on this one
                more = self._begin_queued(ring, in_flight, more=more, may_wait=False)
            self._complete(oldest, seconds)
            ring.give(oldest.slot)

    def _begin_queued(
        self, ring: StagingRing, in_flight: deque[_InFlight], *, more: bool, may_wait: bool = True
    ) -> bool:
        """Post queued frames while slots last, waiting for one if none is in flight.

        Returns:
            Whether more frames may come: False once the end of the queue was met.
        """
        while more and ring.has_free:
            if self._jobs.empty() and (in_flight or not may_wait):
                break
            job = self._jobs.get()
            if job is None:
                return False
            slot = ring.take()
            in_flight.append(_InFlight(job, slot, self._begin(job, slot), monotonic_s()))
        return more

    def _complete(self, frame: _InFlight, seconds: float) -> None:
        moved = self._finish(frame.job, frame.slot)
        self._tell(lambda: self._done(frame.job, moved=moved, seconds=seconds))

    def _tell(self, report: Callable[[], None]) -> None:
        """Run `report` on the event loop; a loop that is gone needs no report."""
        try:
            self._loop.call_soon_threadsafe(report)
        except RuntimeError:
            _log.debug("link %s: the event loop ended first", self.name)

    # ---- what an end adds -----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, job: FrameJob, slot: Slot) -> Posted:
        """I/O thread: fill the slot if sending, and post."""

    @abstractmethod
    def _finish(self, job: FrameJob, slot: Slot) -> bool:
        """I/O thread: the plane is done with the slot. Returns whether rows were moved.

        Raises:
            HandoffError: The frame is not what was announced.
        """

    @abstractmethod
    def _became_ready(self) -> None:
        """Event loop: frames may flow."""

    @abstractmethod
    def _frame_done(self, job: FrameJob, *, moved: bool) -> None:
        """Event loop: a queued frame is through; not called once the link is over."""
