"""The decode worker's half of the handoff: offers, frames and commits of prefill workers.

Promises: a transfer needs a live ticket; its blocks are private until its COMMIT verifies; after
any failure they return to the ledger as soon as no copy can touch them, without waiting for a
stuck link. Everything a prefill worker started here dies with its session, and a broken link ends
its session. Late, repeated and unknown messages are counted and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import HandoffError, SessionClosedError, WireError
from cluster.kv.fabric import RECEIVER_RANK, GlooPlane, SessionStore
from cluster.kv.frames import blocks_per_frame, frame_size
from cluster.kv.hashing import chain_hashes
from cluster.kv.incoming import ReceivingLink
from cluster.kv.link import CONNECT_TIMEOUT_S
from cluster.types import PhaseRecord
from cluster.wire.messages import (
    Abort,
    Accept,
    Ack,
    Commit,
    LinkEpoch,
    Message,
    NextFrame,
    Offer,
    OpenLink,
    Refused,
    Reject,
    Reserved,
    StoreSet,
)
from decode.tickets import TicketBook
from decode.transfer import IncomingTransfer

if TYPE_CHECKING:
    from cluster.kv.allocator import BlockLedger
    from cluster.kv.pool import KvPool
    from cluster.types import AttemptKey, BlockId, GenerationJob, TokenDelta, TransferId
    from cluster.wire.session import Session

_log = logging.getLogger(__name__)

_STOP_PATIENCE_S = 1.0

OnAttach = Callable[
    ["GenerationJob", "tuple[BlockId, ...]", "TokenDelta", "tuple[PhaseRecord, ...]"], None
]


@dataclass(eq=False, slots=True)
class _Peer:
    """What one prefill worker's session holds here."""

    session: Session
    link: ReceivingLink | None = None
    store: SessionStore | None = None
    transfers: dict[TransferId, IncomingTransfer] = field(default_factory=dict)


class Receiver:
    """SessionHandler for prefill workers, and the ticket book for ingress sessions."""

    def __init__(  # noqa: PLR0913 - one plain value each
        self,
        pool: KvPool,
        ledger: BlockLedger,
        *,
        block_size: int,
        frame_bytes: int,
        checksum: bool,
        seed_for: Callable[[str], bytes],
        on_attach: OnAttach,
        on_failed: Callable[[AttemptKey, HandoffError], None],
        on_freed: Callable[[], None],
        host: str = "127.0.0.1",
    ) -> None:
        """`on_attach` takes over one reference per block; `host` is where links listen.

        `on_freed` is called, from whichever thread, when blocks of a dropped transfer came back.
        Frames say themselves whether they carry a checksum, so `checksum` is not needed here.
        """
        self.tickets = TicketBook(ledger, block_size=block_size)
        self.num_ignored = 0  # messages about transfers that are over or were never known
        self._pool = pool
        self._ledger = ledger
        self._block_size = block_size
        self._block_bytes = pool.layout.block_bytes
        self._slot_bytes = frame_size(
            blocks_per_frame(frame_bytes, self._block_bytes), self._block_bytes
        )
        self._seed_for = seed_for
        self._on_attach = on_attach
        self._on_failed = on_failed
        self._on_freed = on_freed
        self._host = host
        self._peers: dict[Session, _Peer] = {}
        self._by_key: dict[AttemptKey, tuple[_Peer, IncomingTransfer]] = {}
        self._bytes_of_old_links = 0
        self._loop = asyncio.get_running_loop()

    # ---- numbers --------------------------------------------------------------------------------

    @property
    def open_transfers(self) -> int:
        """Accepted and neither committed nor given up."""
        return len(self._by_key)

    @property
    def num_sessions(self) -> int:
        """Prefill workers connected."""
        return len(self._peers)

    @property
    def bytes_received(self) -> int:
        """Bytes of KV rows written by transfers, headers not counted."""
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        return self._bytes_of_old_links + sum(link.bytes_received for link in links)

    # ---- for the worker -------------------------------------------------------------------------

    def reserve(self, session: Session, job: GenerationJob) -> Reserved | Refused:
        """Give a ticket or say why not; idempotent."""
        now_s = monotonic_s()
        self.tickets.expire(now_s)
        return self.tickets.reserve(session, job, now_s)

    def take(self, key: AttemptKey) -> GenerationJob | None:
        """Use a ticket for local prefill; None when there is none waiting."""
        return self.tickets.take(key)

    def cancel(self, key: AttemptKey) -> None:
        """The attempt is over: drop its ticket or transfer and refuse repeats. Never reports."""
        held = self._by_key.get(key)
        if held is not None:
            peer, transfer = held
            self._drop(peer, transfer)
            self._tell(peer.session, Abort(transfer.transfer, "cancelled on the decode worker"))
        self.tickets.cancel(key, monotonic_s())

    async def stop(self) -> None:
        """End all links; transfers still open are dropped without a report."""
        peers = list(self._peers.values())
        for peer in peers:
            for transfer in list(peer.transfers.values()):
                self.cancel(transfer.job.key)
            self._end_link(peer, "the decode worker stops")
        waits = [peer.link.ended.wait() for peer in peers if peer.link is not None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), _STOP_PATIENCE_S)

    # ---- session handler ------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A prefill worker connected; an older session of the same one is superseded."""
        for older in list(self._peers):
            if older.peer.peer == session.peer.peer:
                older.close("superseded by a newer session")
        self._peers[session] = _Peer(session)

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Dispatch one message of a prefill worker."""
        peer = self._peers[session]
        try:
            match body:
                case NextFrame():
                    self._expect(peer, body)
                case Offer():
                    self._offered(peer, body)
                case Commit():
                    self._committed(peer, body)
                case Abort(transfer):
                    self._aborted(peer, transfer)
                case OpenLink(transport):
                    self._open_link(peer, transport)
                case StoreSet():
                    self._store_set(peer, body)
                case _:
                    raise WireError(f"{type(body).__name__} is not for a decode worker")
        except WireError as error:
            session.close(error.message)

    def closed(self, session: Session, reason: str) -> None:
        """Its transfers fail, its link is given up, its blocks return."""
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        self._end_link(peer, reason)
        error = HandoffError(f"prefill worker {session.peer.peer} was lost: {reason}")
        for transfer in list(peer.transfers.values()):
            self._fail(peer, transfer, error)
        if peer.link is not None:
            self._bytes_of_old_links += peer.link.bytes_received

    # ---- link -----------------------------------------------------------------------------------

    def _open_link(self, peer: _Peer, transport: str) -> None:
        if transport != "gloo" or peer.link is not None:
            raise WireError(f"cannot open a {transport} link: one gloo link belongs to a session")
        session = peer.session
        epoch = secrets.randbits(64)
        session.send(LinkEpoch(epoch, transport, self._slot_bytes))

        def publish(key: str, value: bytes) -> None:  # from the I/O thread
            body = StoreSet(epoch, key, value)
            self._loop.call_soon_threadsafe(self._tell, session, body)

        peer.store = SessionStore(publish, CONNECT_TIMEOUT_S)
        peer.link = ReceivingLink(
            session.peer.peer,
            epoch,
            GlooPlane(peer.store, RECEIVER_RANK, self._host),
            self._pool,
            slot_bytes=self._slot_bytes,
            on_frame=partial(self._frame_done, peer),
            on_broken=lambda reason: session.close(f"link broke: {reason}"),
        )
        peer.link.open()

    def _store_set(self, peer: _Peer, body: StoreSet) -> None:
        if peer.store is None or peer.link is None or peer.link.epoch != body.epoch:
            self.num_ignored += 1
        else:
            peer.store.put(body.key, body.value)

    def _end_link(self, peer: _Peer, reason: str) -> None:
        if peer.store is not None:
            peer.store.fail(reason)
        if peer.link is not None:
            peer.link.fail(reason)

    # ---- transfers ------------------------------------------------------------------------------

    def _offered(self, peer: _Peer, offer: Offer) -> None:
        reason = self._why_reject(peer, offer)
        transfer = None if reason is not None else self._bind(offer)
        if transfer is None:
            reason = reason or "no room for its blocks"
            peer.session.send(Reject(offer.transfer, reason))
            return
        peer.transfers[offer.transfer] = transfer
        self._by_key[offer.key] = (peer, transfer)
        peer.session.send(Accept(offer.transfer, len(transfer.prefix_rows) * self._block_size))

    def _why_reject(self, peer: _Peer, offer: Offer) -> str | None:
        if offer.transfer in peer.transfers:
            raise WireError(f"transfer {offer.transfer} was offered before")
        job = self.tickets.find(offer.key)
        if job is None:
            return f"no ticket for attempt {offer.key.attempt} of {offer.key.request}"
        tokens = job.prompt_token_ids + job.forced_token_ids
        if offer.num_tokens != len(tokens):
            return f"{offer.num_tokens} tokens offered, the ticket says {len(tokens)}"
        hashes = chain_hashes(
            tokens, block_size=self._block_size, seed=self._seed_for(job.cache_salt)
        )
        if list(offer.block_hashes) != hashes:
            return "block hashes differ from those of the ticket's tokens"
        return None

    def _bind(self, offer: Offer) -> IncomingTransfer | None:
        """Turn the ticket into blocks: what the cache holds, and room for the rest."""
        job = self.tickets.take(offer.key)
        assert job is not None
        prefix = self._ledger.match(offer.block_hashes, ticket=offer.key)
        num_blocks = -(-offer.num_tokens // self._block_size)
        rows = self._ledger.begin_loading(offer.key, num_blocks - len(prefix), ticket=offer.key)
        if rows is None:
            self._ledger.release(prefix)
            self._ledger.forget(offer.key)
            return None
        return IncomingTransfer(
            offer.transfer, job, offer.num_tokens, offer.block_hashes, tuple(prefix), tuple(rows)
        )

    def _expect(self, peer: _Peer, frame: NextFrame) -> None:
        link = peer.link
        if link is None or link.epoch != frame.epoch:
            raise WireError(f"frame announced for epoch {frame.epoch}, which is not open here")
        transfer = peer.transfers.get(frame.transfer)
        if transfer is None:  # given up here; it is on its way all the same
            self.num_ignored += 1
            link.expect(frame, (), None)
        else:
            link.expect(frame, transfer.announce(frame, monotonic_s()), transfer.access)

    def _frame_done(self, peer: _Peer, frame: NextFrame, moved: bool) -> None:
        transfer = peer.transfers.get(frame.transfer)
        if transfer is not None and moved:
            transfer.arrived(frame)
            self._settle(peer, transfer)

    def _committed(self, peer: _Peer, commit: Commit) -> None:
        transfer = peer.transfers.get(commit.transfer)
        if transfer is None or transfer.commit is not None:
            self.num_ignored += 1
            return
        transfer.commit = commit
        self._settle(peer, transfer)

    def _settle(self, peer: _Peer, transfer: IncomingTransfer) -> None:
        """Verify once everything is here, then make the blocks visible, in this order."""
        if not transfer.is_settled:
            return
        assert transfer.commit is not None
        try:
            transfer.verify()
        except HandoffError as error:
            self._tell(peer.session, Abort(transfer.transfer, error.message))
            self._fail(peer, transfer, error)
            return
        now_s = monotonic_s()
        duration_s = 0.0 if transfer.started_s is None else now_s - transfer.started_s
        self._forget(peer, transfer)
        self._ledger.finish_loading(transfer.job.key)
        blocks = transfer.prefix_rows + transfer.rows
        self._register(blocks, transfer)
        phases = (PhaseRecord("handoff", 0.0, duration_s),)
        self._on_attach(transfer.job, blocks, transfer.commit.first_output, phases)
        self._tell(peer.session, Ack(transfer.transfer))

    def _register(self, blocks: tuple[BlockId, ...], transfer: IncomingTransfer) -> None:
        hashes = transfer.block_hashes
        for index in range(len(transfer.prefix_rows), len(hashes)):
            parent = hashes[index - 1] if index else None
            self._ledger.register(blocks[index], hashes[index], parent)

    def _aborted(self, peer: _Peer, number: TransferId) -> None:
        """The prefill worker gave it up, and has told whoever needs to know."""
        transfer = peer.transfers.get(number)
        if transfer is None:
            self.num_ignored += 1
            return
        self._drop(peer, transfer)
        self.tickets.cancel(transfer.job.key, monotonic_s())

    def _fail(self, peer: _Peer, transfer: IncomingTransfer, error: HandoffError) -> None:
        key = transfer.job.key
        self._drop(peer, transfer)
        self.tickets.cancel(key, monotonic_s())
        self._on_failed(key, error)

    def _drop(self, peer: _Peer, transfer: IncomingTransfer) -> None:
        """Forget a transfer; its rows are freed once no frame is being scattered into them."""
        self._forget(peer, transfer)
        self._ledger.forget(transfer.job.key)
        transfer.access.close(partial(self._free, transfer))

    def _free(self, transfer: IncomingTransfer) -> None:
        """Runs here or on the link's thread; the ledger takes either."""
        self._ledger.abort_loading(transfer.job.key)
        self._ledger.release(transfer.prefix_rows)
        self._on_freed()

    def _forget(self, peer: _Peer, transfer: IncomingTransfer) -> None:
        peer.transfers.pop(transfer.transfer, None)
        self._by_key.pop(transfer.job.key, None)

    @staticmethod
    def _tell(session: Session, body: Message) -> None:
        """Send unless the session is over; its `closed` report frees what it held."""
        with contextlib.suppress(SessionClosedError):
            session.send(body)
