"""One session per listed worker, kept open by the ingress.

Owns connecting, reconnecting and what each worker last said of itself. Promises: a listed worker
is connected to as soon as it answers; messages of a worker reach the sink in order; a lost session
is reported at once, for that worker alone. Sessions are opened from a task of their own in a clean
context, never inside a request, because whatever a request starts may be cancelled with it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.errors import HandshakeError, SessionClosedError
from cluster.wire.messages import Failed, Message, Snapshot, Tokens
from cluster.wire.session import Identity, Session, SessionOptions, connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.types import Role, TokenDelta, WorkerAddress, WorkerId, WorkerSnapshot
    from router.directory import WorkerDirectory

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0


class SessionSink(Protocol):
    """Who wants to know what workers say; all calls on the event loop."""

    def tokens(self, worker: WorkerId, deltas: Sequence[TokenDelta]) -> None:
        """New tokens of any number of requests."""

    def failed(self, worker: WorkerId, failure: Failed) -> None:
        """One attempt ended without finishing."""

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        """The session ended; nothing this worker held for us exists any more."""

    def reported(self, snapshot: WorkerSnapshot) -> None:
        """A worker sent its state."""

    def changed(self) -> None:
        """Some worker came or went."""


@dataclass(slots=True)
class Peer:
    """A listed worker as this ingress sees it."""

    address: WorkerAddress
    session: Session | None = None
    snapshot: WorkerSnapshot | None = None
    refusal: str | None = None  # why the last handshake failed
    lost: bool = False  # had a session that ended

    @property
    def alive(self) -> bool:
        """Whether a session is open."""
        return self.session is not None


class WorkerSessions:
    """All peers of one ingress; the SessionHandler of their sessions."""

    def __init__(
        self,
        me: Identity,
        options: SessionOptions,
        directory: WorkerDirectory,
        sink: SessionSink,
    ) -> None:
        """`run` does the work."""
        self._me = me
        self._options = options
        self._directory = directory
        self._sink = sink
        self._peers: dict[WorkerId, Peer] = {}
        self._keepers: dict[WorkerId, asyncio.Task[None]] = {}
        self._listed = asyncio.Event()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All listed workers, ordered by id."""
        return tuple(self._peers[worker] for worker in sorted(self._peers))

    def alive(self, role: Role) -> tuple[Peer, ...]:
        """Peers of a role with an open session, ordered by id."""
        return tuple(p for p in self.peers if p.alive and p.address.role is role)

    def find(self, worker: WorkerId) -> Peer | None:
        """The peer, dead or alive."""
        return self._peers.get(worker)

    def send(self, worker: WorkerId, body: Message) -> bool:
        """Send if the session is open; False if there is nobody to send to."""
        peer = self._peers.get(worker)
        if peer is None or peer.session is None or peer.session.closed.is_set():
            return False
        peer.session.send(body)
        return True

    async def run(self) -> None:
        """Keep sessions to whatever the directory lists; ends only by cancellation."""
        self._directory.subscribe(lambda _: self._listed.set())
        async with asyncio.TaskGroup() as group:
            while True:
                self._listed.clear()
                self._follow(group)
                await self._listed.wait()

    # ---- session handler ------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """Take the session as this worker's."""
        peer = self._peers.get(session.peer.peer)
        if peer is None or peer.address.incarnation != session.peer.incarnation:
            session.close("this worker is not listed")
            return
        peer.session, peer.refusal = session, None

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Pass on what a worker says."""
        worker = session.peer.peer
        match body:
            case Tokens(deltas):
                self._sink.tokens(worker, deltas)
            case Failed():
                self._sink.failed(worker, body)
            case Snapshot(snapshot):
                self._store(session, snapshot)
            case _:
                session.close(f"an ingress takes no {type(body).__name__}")

    def closed(self, session: Session, reason: str) -> None:
        """Report the loss of this worker, once and for it alone."""
        peer = self._peers.get(session.peer.peer)
        if peer is not None and peer.session is session:
            peer.session, peer.lost = None, True
            log.info("session to %s ended: %s", session.peer.peer, reason)
            self._sink.worker_lost(session.peer.peer, reason)
            self._sink.changed()

    # ---- keeping --------------------------------------------------------------------------------

    def _store(self, session: Session, snapshot: WorkerSnapshot) -> None:
        peer = self._peers.get(session.peer.peer)
        if peer is not None and peer.session is session:
            peer.snapshot = snapshot
            self._sink.reported(snapshot)

    def _follow(self, group: asyncio.TaskGroup) -> None:
        """Make the peers equal to the directory's list."""
        listed = {address.worker: address for address in self._directory.current}
        for worker, peer in list(self._peers.items()):
            if listed.get(worker) == peer.address:
                continue
            self._keepers.pop(worker).cancel()
            session = peer.session
            if session is not None:
                session.close("no longer listed")
                self.closed(session, "no longer listed")
            del self._peers[worker]
        for worker, address in listed.items():
            if worker not in self._peers:
                peer = self._peers[worker] = Peer(address)
                self._keepers[worker] = group.create_task(self._keep(peer), name=f"keep {worker}")
        self._sink.changed()

    async def _keep(self, peer: Peer) -> None:
        """Connect, wait for the end, connect again with growing pauses."""
        pause_s = FIRST_RETRY_S
        while True:
            session = await self._connect(peer)
            if session is not None:
                pause_s = FIRST_RETRY_S
                await session.closed.wait()
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, pause_s * 2)

    async def _connect(self, peer: Peer) -> Session | None:
        try:
            return await connect(
                peer.address.control,
                self._me,
                self,
                self._options,
                expect_incarnation=peer.address.incarnation,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        except HandshakeError as error:
            if peer.refusal != error.message:
                log.warning("%s refused: %s", peer.address.worker, error.message)
            peer.refusal = error.message
        except SessionClosedError as error:
            log.debug("%s does not answer: %s", peer.address.worker, error.message)
        return None
