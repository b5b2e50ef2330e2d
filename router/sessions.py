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

from cluster.clock import monotonic_s
from cluster.errors import HandshakeError, SessionClosedError
from cluster.types import WorkerState
from cluster.wire.messages import Failed, Message, Snapshot, Tokens
from cluster.wire.session import Identity, Session, SessionOptions, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.types import Incarnation, Role, TokenDelta, WorkerAddress, WorkerId, WorkerSnapshot
    from router.directory import WorkerDirectory

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0
SETTLE_S = 5.0  # a new ingress may take so long to connect to workers that have long been there


class SessionSink(Protocol):
    """Who wants to know what workers say; all calls on the event loop."""

    def tokens(self, worker: WorkerId, deltas: Sequence[TokenDelta]) -> None:
        """New tokens of any number of requests."""

    def failed(self, worker: WorkerId, failure: Failed) -> None:
        """One attempt ended without finishing."""

    def worker_lost(self, peer: Peer, reason: str) -> None:
        """The session ended; nothing this worker held for us exists any more."""

    def needs(self, peer: Peer) -> bool:
        """Whether some request still depends on this worker."""

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
    leaving: bool = False  # no longer listed: kept only while requests need it

    @property
    def alive(self) -> bool:
        """Whether a session is open."""
        return self.session is not None

    @property
    def takes_work(self) -> bool:
        """Whether new requests may go there."""
        draining = self.snapshot is not None and self.snapshot.state is not WorkerState.READY
        return self.alive and not self.leaving and not draining


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
        self._leaving: dict[Incarnation, Peer] = {}
        self._dead: dict[WorkerId, Peer] = {}  # lost, then no longer listed, not yet replaced
        self._on_left: list[Callable[[], None]] = []
        self._keepers: dict[WorkerId, asyncio.Task[None]] = {}
        self._listed = asyncio.Event()
        self._settled_s = monotonic_s() + SETTLE_S
        self._met: set[Role] = set()  # roles that ever had a session

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Workers that are listed, still leave, or died and were not replaced, ordered by id."""
        everyone = [*self._peers.values(), *self._dead.values(), *self._leaving.values()]
        return tuple(sorted(everyone, key=lambda peer: (peer.address.worker, peer.leaving)))

    def alive(self, role: Role) -> tuple[Peer, ...]:
        """Peers of a role that take work, ordered by id."""
        return tuple(p for p in self.peers if p.takes_work and p.address.role is role)

    def expects(self, role: Role) -> bool:
        """Whether this ingress is so new that workers of a role may only not be connected yet."""
        return role not in self._met and monotonic_s() < self._settled_s

    def find(self, worker: WorkerId) -> Peer | None:
        """The listed peer, dead or alive."""
        return self._peers.get(worker)

    def send(self, peer: Peer, body: Message) -> bool:
        """Send if the session is open; False if there is nobody to send to."""
        if peer.session is None or peer.session.closed.is_set():
            return False
        try:
            peer.session.send(body)
        except SessionClosedError:  # the message overflowed its queue, which ends the session
            return False
        return True

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether a session to this process is open; after `on_left` it may not be."""
        return any(p.alive and p.address.incarnation == incarnation for p in self.peers)

    def on_left(self, callback: Callable[[], None]) -> None:
        """Call back whenever a leaving worker is not needed any more."""
        self._on_left.append(callback)

    def let_go(self) -> None:
        """End the sessions of leaving workers that no request depends on."""
        for peer in tuple(self._leaving.values()):
            if peer.session is not None and not self._sink.needs(peer):
                peer.session.close("drained")

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
        mine, theirs = (x.layout.get("fingerprint") for x in (self._me, session.peer))
        if mine != theirs:
            peer.refusal = f"fingerprint differs: {theirs} there, {mine} here"
            session.close(peer.refusal)
            return
        peer.session, peer.refusal = session, None
        self._met.add(session.peer.role)

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
        if peer is None or peer.session is not session:
            peer = self._leaving.pop(session.peer.incarnation, None)
        if peer is None or peer.session is not session:
            return
        peer.session, peer.lost = None, True
        log.info("session to %s ended: %s", session.peer.peer, reason)
        self._sink.worker_lost(peer, reason)
        self._sink.changed()
        if peer.leaving:
            for callback in self._on_left:
                callback()

    # ---- keeping --------------------------------------------------------------------------------

    def _store(self, session: Session, snapshot: WorkerSnapshot) -> None:
        peer = self._peers.get(session.peer.peer)
        if peer is None or peer.session is not session:
            peer = self._leaving.get(session.peer.incarnation)
        if peer is not None and peer.session is session:
            peer.snapshot = snapshot
            self._sink.reported(snapshot)

    def _follow(self, group: asyncio.TaskGroup) -> None:
        """Make the peers equal to the directory's list."""
        listed = {address.worker: address for address in self._directory.current}
        for worker, peer in list(self._peers.items()):
            if listed.get(worker) == peer.address:
                continue
            keeper = self._keepers.pop(worker)
            del self._peers[worker]
            if peer.session is None:
                keeper.cancel()
                if peer.lost:
                    self._dead[worker] = peer
            else:  # draining: what runs there may finish
                peer.leaving = True
                self._leaving[peer.address.incarnation] = peer
        for worker, address in listed.items():
            if worker not in self._peers:
                self._dead.pop(worker, None)
                peer = self._peers[worker] = Peer(address)
                self._keepers[worker] = group.create_task(self._keep(peer), name=f"keep {worker}")
        self.let_go()
        self._sink.changed()

    async def _keep(self, peer: Peer) -> None:
        """Connect, wait for the end, connect again with growing pauses while it is listed."""
        pause_s = FIRST_RETRY_S
        while not peer.leaving:
            session = await self._connect(peer)
            if session is not None:
                opened_s = monotonic_s()
                await session.closed.wait()
                if monotonic_s() - opened_s > MAX_RETRY_S:  # it had been a working one
                    pause_s = FIRST_RETRY_S
                if peer.leaving:
                    return
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
