"""The way to one decode worker: its session, its link and the transfers on them.

A route lives as long as its session. Whatever breaks (connecting, the handshake, a frame, the
peer) ends the route and fails its transfers at once; the next job for that worker starts a new
one. OFFER leaves as soon as the session is up, frames flow once the link is ready too.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.errors import HandoffError, SessionClosedError, WireError
from cluster.kv.fabric import SENDER_RANK, GlooPlane, SessionStore
from cluster.kv.link import CONNECT_TIMEOUT_S, LinkState
from cluster.kv.outgoing import Outgoing, SendingLink
from cluster.types import LinkStatus, TransferId
from cluster.wire.messages import (
    Abort,
    Accept,
    Ack,
    Commit,
    LinkEpoch,
    Message,
    Offer,
    OpenLink,
    Reject,
    StoreSet,
)
from cluster.wire.session import Identity, Session, SessionOptions, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.kv.pool import KvPool
    from cluster.types import AttemptKey, BlockHash, TokenDelta, WorkerAddress

_log = logging.getLogger(__name__)

_EPOCH_TIMEOUT_S = 5.0
_ACCEPT_TIMEOUT_S = 5.0
_ACK_TIMEOUT_S = 20.0  # after COMMIT: up to three frames of others may still be ahead
TRANSPORT = "gloo"


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What all routes of a prefill worker share."""

    me: Identity
    session: SessionOptions
    pool: KvPool
    block_size: int  # tokens
    slot_bytes: int  # largest frame we send
    checksum: bool
    host: str  # numeric address where links listen


@dataclass(eq=False, slots=True)
class Transfer:
    """One job's KV on its way to a decode worker."""

    key: AttemptKey
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]  # of the full blocks
    out: Outgoing
    first_output: TokenDelta | None = None  # token 1, once the prompt is complete
    is_offered: bool = False
    is_over: bool = False
    deadline: asyncio.TimerHandle | None = None


class Route:
    """SessionHandler of one (prefill, decode) session; reports each transfer's end once."""

    def __init__(
        self,
        decode: WorkerAddress,
        options: RouteOptions,
        on_end: Callable[[Transfer, HandoffError | None], None],
    ) -> None:
        """`on_end` is called synchronously when a transfer is over, in any way but `give_up`."""
        self.decode = decode
        self.failure: str | None = None  # why the route is over
        self.settled = asyncio.Event()  # the link is ready, or the route is over
        self._options = options
        self._on_end = on_end
        self._session: Session | None = None
        self._link: SendingLink | None = None
        self._store: SessionStore | None = None
        self._transfers: dict[TransferId, Transfer] = {}
        self._next_transfer = 1
        self._loop = asyncio.get_running_loop()
        self._dialling: asyncio.Task[None] | None = None

    # ---- life -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Start connecting, outside the context of whatever asked for it."""
        self._dialling = self._loop.create_task(
            self._dial(), name=f"dial {self.decode.worker}", context=contextvars.Context()
        )

    def close(self, reason: str) -> None:
        """End the route; its transfers fail."""
        if self._dialling is not None:
            self._dialling.cancel()
        if self._session is not None:
            self._session.close(reason)
        self._end(reason)

    async def join(self) -> None:
        """Wait for the link's thread; call it after `close`, under a deadline of your own."""
        if self._link is not None:
            await self._link.ended.wait()

    def status(self) -> LinkStatus:
        """The link as `status` shows it."""
        link = self._link
        state = LinkState.CONNECTING if link is None else link.state
        return LinkStatus(
            decode=self.decode.worker,
            transport=TRANSPORT,
            state=(LinkState.BROKEN if self.failure is not None else state).value,
            epoch=0 if link is None else link.epoch,
            gb_per_s=None if link is None else link.gb_per_s,
        )

    @property
    def has_session(self) -> bool:
        """Whether the decode worker is connected."""
        return self._session is not None and self.failure is None

    @property
    def bytes_sent(self) -> int:
        """Bytes of KV rows sent over this route, headers not counted."""
        return 0 if self._link is None else self._link.bytes_sent

    async def _dial(self) -> None:
        try:
            await connect(
                self.decode.control,
                self._options.me,
                self,
                self._options.session,
                expect_incarnation=self.decode.incarnation,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        except WireError as error:
            self._end(error.message)
        except Exception as error:  # noqa: BLE001 - logged; the route ends
            _log.exception("connecting to %s failed", self.decode.worker)
            self._end(f"internal error: {error}")

    def _end(self, reason: str) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        self.settled.set()
        if self._store is not None:
            self._store.fail(reason)
        if self._link is not None:
            self._link.fail(reason)
        for transfer in list(self._transfers.values()):
            self._finish(transfer, HandoffError(f"{self.decode.worker}: {reason}"))

    # ---- transfers ------------------------------------------------------------------------------

    def start(
        self, key: AttemptKey, num_tokens: int, block_hashes: tuple[BlockHash, ...]
    ) -> Transfer:
        """Offer a transfer now or as soon as the session is up."""
        number = TransferId(self._next_transfer)
        self._next_transfer += 1
        transfer = Transfer(key, num_tokens, block_hashes, Outgoing(number))
        self._transfers[number] = transfer
        if self._session is not None:
            self._offer(transfer)
        if self._link is not None:
            self._link.add(transfer.out, partial(self._announced, transfer))
        return transfer

    def pump(self) -> None:
        """A transfer's numbers changed: send what may go."""
        if self._link is not None:
            self._link.pump()

    def give_up(self, transfer: Transfer, reason: str) -> None:
        """Stop at the next frame boundary and tell the peer; not reported to `on_end`."""
        if transfer.is_over:
            return
        self._forget(transfer)
        if transfer.is_offered:
            self._send(Abort(transfer.out.transfer, reason))

    def _offer(self, transfer: Transfer) -> None:
        self._send(
            Offer(transfer.out.transfer, transfer.key, transfer.num_tokens, transfer.block_hashes)
        )
        transfer.is_offered = True
        self._expect_answer(transfer, "ACCEPT", _ACCEPT_TIMEOUT_S)

    def _expect_answer(self, transfer: Transfer, what: str, timeout_s: float) -> None:
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        transfer.deadline = self._loop.call_later(
            timeout_s, self._unanswered, transfer, f"no {what} within {timeout_s} s"
        )

    def _unanswered(self, transfer: Transfer, reason: str) -> None:
        self._send(Abort(transfer.out.transfer, reason))
        self._finish(transfer, HandoffError(f"{self.decode.worker}: {reason}"))

    def _announced(self, transfer: Transfer) -> None:
        """The last frame is announced: COMMIT may follow, the receiver waits for the data."""
        assert transfer.first_output is not None
        out = transfer.out
        self._send(
            Commit(
                transfer=out.transfer,
                key=transfer.key,
                num_frames=out.num_frames,
                num_blocks=out.next_block - (out.first_block or 0),
                num_tokens=transfer.num_tokens,
                first_output=transfer.first_output,
            )
        )
        self._expect_answer(transfer, "ACK", _ACK_TIMEOUT_S)

    def _finish(self, transfer: Transfer, error: HandoffError | None) -> None:
        if not transfer.is_over:
            self._forget(transfer)
            self._on_end(transfer, error)

    def _forget(self, transfer: Transfer) -> None:
        transfer.is_over = True
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        self._transfers.pop(transfer.out.transfer, None)
        if self._link is not None:
            self._link.remove(transfer.out)

    # ---- session handler ------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """Ask for a link and offer what has waited."""
        if self.failure is not None:
            session.close(self.failure)
            return
        self._session = session
        session.send(OpenLink(TRANSPORT))
        self._loop.call_later(_EPOCH_TIMEOUT_S, self._require_link, session)
        for transfer in list(self._transfers.values()):
            self._offer(transfer)

    def _require_link(self, session: Session) -> None:
        """Without an epoch nothing could ever be sent: better no session than a silent one."""
        if self._link is None and self.failure is None:
            session.close(f"no LINK_EPOCH within {_EPOCH_TIMEOUT_S} s")

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Dispatch one message of the decode worker."""
        match body:
            case LinkEpoch():
                self._open_link(session, body)
            case StoreSet(epoch, key, value):
                self._store_set(epoch, key, value)
            case Accept(number, first_token):
                self._accepted(session, number, first_token)
            case Reject(number, reason) | Abort(number, reason):
                transfer = self._transfers.get(number)
                if transfer is not None:
                    error = HandoffError(f"{self.decode.worker} refused the transfer: {reason}")
                    self._finish(transfer, error)
            case Ack(number):
                transfer = self._transfers.get(number)
                if transfer is not None and transfer.first_output is not None:
                    self._finish(transfer, None)
            case _:
                session.close(f"a prefill worker takes no {type(body).__name__}")

    def closed(self, session: Session, reason: str) -> None:
        """The route is over."""
        self._end(reason)

    def _open_link(self, session: Session, body: LinkEpoch) -> None:
        if self._link is not None or body.transport != TRANSPORT:
            session.close("a second link on one session")
            return
        options, loop = self._options, self._loop

        def publish(key: str, value: bytes) -> None:  # from the I/O thread
            loop.call_soon_threadsafe(self._send, StoreSet(body.epoch, key, value))

        self._store = SessionStore(publish, CONNECT_TIMEOUT_S)
        self._link = SendingLink(
            session,
            body.epoch,
            GlooPlane(self._store, SENDER_RANK, options.host),
            options.pool,
            slot_bytes=min(options.slot_bytes, body.slot_bytes),
            checksum=options.checksum,
            on_ready=self.settled.set,
            on_broken=lambda reason: session.close(f"link broke: {reason}"),
        )
        self._link.open()
        for transfer in self._transfers.values():
            self._link.add(transfer.out, partial(self._announced, transfer))

    def _store_set(self, epoch: int, key: str, value: bytes) -> None:
        if self._store is not None and self._link is not None and epoch == self._link.epoch:
            self._store.put(key, value)

    def _accepted(self, session: Session, number: TransferId, first_token: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.out.first_block is not None:
            return
        if not 0 <= first_token <= transfer.num_tokens or first_token % self._options.block_size:
            session.close(f"ACCEPT from token {first_token} of {transfer.num_tokens}")
            return
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        transfer.out.accept(first_token // self._options.block_size)
        self.pump()

    def _send(self, body: Message) -> None:
        """Send if there is still someone to send to; `closed` takes care of the rest."""
        if self._session is not None:
            try:
                self._session.send(body)
            except SessionClosedError as error:
                _log.debug("%s not sent: %s", type(body).__name__, error.message)
