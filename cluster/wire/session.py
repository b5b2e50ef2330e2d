"""Sessions over gRPC: accepting them on a port and opening them to an address.

The only module that knows gRPC: one generic bidirectional method that carries raw bytes. What the
bytes mean is in `codec.py` and `messages.py`, who the peer is in `handshake.py`, what a session
promises in `peer.py`. A session outlives the request that happened to open it, so its tasks run in
an empty context: frameworks that cancel what a request started (Ray Serve does) find their tasks
by context variables. A connection that has not proven itself within 5 s is dropped; random bytes,
half-open connections and oversized messages cost their own connection only.
"""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from cluster.errors import SessionClosedError, WireError
from cluster.wire import codec
from cluster.wire.handshake import Identity, accept_peer, greet_peer
from cluster.wire.peer import WRITE_BATCH_BYTES, Session, SessionHandler, SessionOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.types import Incarnation

__all__ = ["Identity", "Session", "SessionHandler", "SessionOptions", "SessionServer", "connect"]

_log = logging.getLogger(__name__)

_SERVICE = "diptych.Session"
_METHOD = "Open"
_HANDSHAKE_TIMEOUT_S = 5.0
_STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class _Rpc(Protocol):
    """What a client's call and a servicer's context have in common."""

    async def read(self) -> object: ...
    async def write(self, data: bytes, /) -> None: ...


class _GrpcStream:
    """Adapts a client call or a servicer context; errors of either become `SessionClosedError`."""

    def __init__(self, rpc: _Rpc) -> None:
        self._rpc: _Rpc | None = rpc

    def drop(self) -> None:
        """Let go of the call: gRPC keeps its connection open for as long as someone holds it."""
        self._rpc = None

    async def read(self) -> bytes | None:
        if self._rpc is None:
            return None
        try:
            message = await self._rpc.read()
        except _STREAM_ERRORS as error:
            raise SessionClosedError(f"stream broke: {_explain(error)}") from error
        return message if isinstance(message, bytes) else None  # else grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        if self._rpc is None:
            raise SessionClosedError("the stream is gone")
        try:
            await self._rpc.write(data)
        except _STREAM_ERRORS as error:
            raise SessionClosedError(f"stream broke: {_explain(error)}") from error


class SessionServer:
    """Accepts sessions on one port of one numeric host."""

    def __init__(
        self,
        me: Identity,
        handler: SessionHandler,
        options: SessionOptions,
        host: str = "127.0.0.1",
    ) -> None:
        """Nothing is bound before `start`."""
        self._me = me
        self._handler = handler
        self._options = options
        self._host = host
        self._server: Any = None
        self._sessions: set[Session] = set()

    async def start(self) -> str:
        """Bind a free port and return "host:port"."""
        loop = asyncio.get_running_loop()
        return await loop.create_task(self._start(), context=contextvars.Context())

    async def _start(self) -> str:
        options = [
            *_channel_options(self._options),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),
            ("grpc.max_connection_idle_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),  # no open stream
        ]
        server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
        )
        port = server.add_insecure_port(f"{self._host}:0")
        await server.start()
        self._server = server
        return f"{self._host}:{port}"

    async def stop(self) -> None:
        """Close every session and the port."""
        for session in tuple(self._sessions):
            session.close("worker stops")
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _serve(self, _requests: AsyncIterator[bytes], rpc: _Rpc) -> None:
        stream = _GrpcStream(rpc)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                peer = await accept_peer(stream, self._me, self._options.secret)
        except (WireError, TimeoutError) as error:
            _log.warning("refused a session: %s", _explain(error))
            return
        session = Session(peer, stream, self._handler, self._options)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            stream.drop()


async def connect(
    address: str,
    me: Identity,
    handler: SessionHandler,
    options: SessionOptions,
    *,
    expect_incarnation: Incarnation | None,
    timeout_s: float,
) -> Session:
    """Open a session to a worker at a numeric "host:port"; it runs until it closes.

    Raises:
        HandshakeError: Either end refused; the message names the field and both values.
        SessionClosedError: Nobody answers there, or not within `timeout_s`.
    """
    opening = asyncio.get_running_loop().create_task(
        _connect(address, me, handler, options, expect_incarnation, timeout_s),
        context=contextvars.Context(),
    )
    try:
        return await opening
    except asyncio.CancelledError:
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result().close("whoever opened it was cancelled")
        raise


async def _connect(
    address: str,
    me: Identity,
    handler: SessionHandler,
    options: SessionOptions,
    expect_incarnation: Incarnation | None,
    timeout_s: float,
) -> Session:
    channel = grpc.aio.insecure_channel(_target(address), options=_channel_options(options))
    try:
        stream = _GrpcStream(channel.stream_stream(f"/{_SERVICE}/{_METHOD}")())
        async with asyncio.timeout(timeout_s):
            peer = await greet_peer(
                stream, me, options.secret, expect_incarnation=expect_incarnation
            )
    except BaseException as error:
        await channel.close()
        if isinstance(error, TimeoutError):
            raise SessionClosedError(f"{address} did not answer within {timeout_s} s") from None
        raise
    session = Session(peer, stream, handler, options)
    session.carrier = asyncio.get_running_loop().create_task(
        _run_client(session, stream, channel), name=f"session {peer.peer}"
    )
    return session


async def _run_client(session: Session, stream: _GrpcStream, channel: grpc.aio.Channel) -> None:
    try:
        await session.run()
    finally:
        stream.drop()
        await channel.close()


def _channel_options(options: SessionOptions) -> list[tuple[str, int]]:
    largest_bytes = max(options.max_message_bytes, WRITE_BATCH_BYTES) + codec.ARRAY_HEADER_BYTES
    return [
        ("grpc.max_receive_message_length", largest_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # one connection per session, none shared
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),  # no name lookups
    ]


def _target(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        version = ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        raise SessionClosedError(f"{address!r} is no numeric host:port") from None
    return f"ipv{version}:{host}:{port}"


def _explain(error: BaseException) -> str:
    """One line for the log; gRPC errors print as whole paragraphs otherwise."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error) or type(error).__name__
