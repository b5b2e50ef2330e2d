"""An open session: message order, calls, heartbeats and the outbound queue.

One authenticated, ordered, bidirectional stream joins a pair of processes. Promises: messages
arrive in order; `closed` is reported exactly once, at once on EOF and after `dead_after_s` of
silence otherwise; a broken or hostile peer costs its own session only. Never blocks the event
loop, never retries and never reconnects: that is the owner's decision. Knows no transport.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from cluster.errors import DeadlineError, SessionClosedError, WireError
from cluster.wire import codec
from cluster.wire.messages import Envelope, Heartbeat, Hello, Message, Proof, Refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.wire.handshake import ByteStream
    from cluster.wire.messages import Any as AnyMessage

_log = logging.getLogger(__name__)

WRITE_BATCH_BYTES = 256 * 1024  # messages are joined into one write up to about this size
_FLUSH_S = 0.2  # for messages queued before `close`


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What every session of a process shares."""

    secret: bytes
    heartbeat_s: float = 1.0
    dead_after_s: float = 4.0
    max_message_bytes: int = 16 * 1024 * 1024
    max_queued_bytes: int = 64 * 1024 * 1024  # outbound, unsent; beyond it the session closes


class SessionHandler(Protocol):
    """Who a session reports to: on the event loop, in order, synchronously."""

    def opened(self, session: Session) -> None:
        """The handshake is done; `session.peer` is proven."""

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """A message came; with `call` set, answer by `session.send(x, reply_to=call)`."""

    def closed(self, session: Session, reason: str) -> None:
        """The session is over; reported exactly once, nothing follows."""


class Session:
    """One end of an open session. Every method belongs to the event loop's thread."""

    def __init__(
        self, peer: Hello, stream: ByteStream, handler: SessionHandler, options: SessionOptions
    ) -> None:
        """Made by `connect` and `SessionServer` once the peer is proven; nothing runs yet."""
        self.peer = peer
        self.closed = asyncio.Event()
        self.close_reason: str | None = None
        self.num_late_answers = 0  # answers to calls that were given up
        self._stream = stream
        self._handler = handler
        self._options = options
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0  # queued or being written
        self._outbox_filled = asyncio.Event()
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._next_call = 1
        self.carrier: asyncio.Task[None] | None = None  # keeps the task of `run` alive
        self._last_heard_s = time.monotonic()
        self._last_tick_s = time.monotonic()  # when this process was last known to be running
        self._reported = False

    def send(self, body: Message, *, reply_to: int | None = None, call: int | None = None) -> None:
        """Queue a message; never blocks.

        Raises:
            SessionClosedError: The session is over, or this message overflowed its queue.
            WireError: The message alone is larger than any peer would accept.
        """
        if self.closed.is_set():
            raise SessionClosedError(f"session to {self.peer.peer}: {self.close_reason}")
        data = codec.encode(Envelope(cast("AnyMessage", body), call, reply_to))
        if len(data) > self._options.max_message_bytes:
            raise WireError(f"{type(body).__name__} of {len(data)} bytes is over the limit")
        if self._outbox_bytes + len(data) > self._options.max_queued_bytes:
            self.close(f"peer reads too slowly: {self._outbox_bytes} bytes unsent")
            raise SessionClosedError(f"session to {self.peer.peer}: {self.close_reason}")
        self._outbox.append(data)
        self._outbox_bytes += len(data)
        self._outbox_filled.set()

    async def call(self, body: Message, *, timeout_s: float) -> Message:
        """Send a message and wait for its answer.

        Raises:
            SessionClosedError: The session ended first.
            DeadlineError: No answer within `timeout_s`; a later one is counted and dropped.
        """
        number = self._next_call
        self._next_call += 1
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self.send(body, call=number)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            name = type(body).__name__
            raise DeadlineError(
                f"{self.peer.peer} left {name} unanswered for {timeout_s} s"
            ) from None
        finally:
            self._calls.pop(number, None)

    def close(self, reason: str) -> None:
        """End the session: open calls fail and `closed` is reported, what was sent still leaves.

        It leaves if the peer takes it within a moment; nobody waits for that.
        """
        if self.closed.is_set():
            return
        self.close_reason = reason
        self.closed.set()
        self._outbox_filled.set()
        self._fail_calls()
        asyncio.get_running_loop().call_soon(self._report_closed, context=contextvars.Context())

    async def run(self) -> None:
        """Carry the session until it closes. Started once, by whoever made the session."""
        if self._guarded("opened", lambda: self._handler.opened(self)):
            try:
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read_loop())
                    writer = group.create_task(self._write_loop())
                    watcher = group.create_task(self._watch_loop())
                    await self.closed.wait()
                    await asyncio.wait([writer], timeout=_FLUSH_S)
                    for task in (reader, writer, watcher):
                        task.cancel()
            finally:  # the transport may cancel us instead
                self.close("stream ended")
                self._outbox.clear()
        self._report_closed()

    async def _read_loop(self) -> None:
        while not self.closed.is_set():
            try:
                data = await self._stream.read()
            except SessionClosedError as error:
                self.close(error.message)
                return
            if data is None:
                self.close("peer closed the stream")
                return
            if self._was_suspended():
                return
            self._last_heard_s = time.monotonic()
            try:
                envelopes = codec.unpack(data)
            except WireError as error:
                _log.warning("session to %s: %s", self.peer.peer, error.message)
                self.close(error.message)
                return
            for envelope in envelopes:
                self._deliver(envelope)

    async def _write_loop(self) -> None:
        while not (self.closed.is_set() and not self._outbox):
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                batch = [self._outbox.popleft()]
                size = len(batch[0])
                while self._outbox and size + len(self._outbox[0]) <= WRITE_BATCH_BYTES:
                    batch.append(self._outbox.popleft())
                    size += len(batch[-1])
                try:
                    await self._stream.write(codec.pack(batch))
                except SessionClosedError as error:
                    self.close(error.message)
                    return
                self._outbox_bytes -= size

    async def _watch_loop(self) -> None:
        """Beat, and notice a peer's silence or our own process's suspension."""
        while not self.closed.is_set():
            await asyncio.sleep(self._options.heartbeat_s)
            if self._was_suspended():
                return
            self._last_tick_s = time.monotonic()
            silent_s = self._last_tick_s - self._last_heard_s
            if silent_s > self._options.dead_after_s:
                self.close(f"peer silent for {silent_s:.1f} s")
            elif not self._outbox:  # anything queued says as much as a heartbeat
                self.send(Heartbeat())

    def _was_suspended(self) -> bool:
        """Whether this process stood still so long that the peer must have given us up."""
        gap_s = time.monotonic() - self._last_tick_s
        if gap_s > self._options.dead_after_s:
            self.close(f"this process stood still for {gap_s:.1f} s")
        return self.closed.is_set()

    def _deliver(self, envelope: Envelope) -> None:
        body = envelope.body
        if self.closed.is_set() or isinstance(body, Heartbeat):
            return
        if isinstance(body, Refuse):
            self.close(f"peer refused: {body.reason}")
        elif isinstance(body, Hello | Proof):
            self.close(f"{type(body).__name__} after the handshake")
        elif envelope.reply_to is not None:
            answer = self._calls.pop(envelope.reply_to, None)
            if answer is None or answer.done():
                self.num_late_answers += 1
            else:
                answer.set_result(body)
        else:
            self._guarded(
                type(body).__name__, lambda: self._handler.received(self, body, envelope.call)
            )

    def _guarded(self, what: str, callback: Callable[[], None]) -> bool:
        """Run a handler's callback; a failure of it ends this session and nothing else."""
        try:
            callback()
        except SessionClosedError as error:
            self.close(error.message)
        except Exception:  # noqa: BLE001 - logged with its traceback; the session is torn down
            _log.exception("session to %s: handling %s failed", self.peer.peer, what)
            self.close(f"internal error while handling {what}")
        return not self.closed.is_set()

    def _fail_calls(self) -> None:
        error = f"session to {self.peer.peer}: {self.close_reason}"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(SessionClosedError(error))
        self._calls.clear()

    def _report_closed(self) -> None:
        if self._reported:
            return
        self._reported = True
        try:
            self._handler.closed(self, self.close_reason or "closed")
        except Exception:  # noqa: BLE001 - logged with its traceback; the session is torn down
            _log.exception("session to %s: handling its end failed", self.peer.peer)
