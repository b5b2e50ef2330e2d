"""Who a peer claims to be, the proof of it, and whether the two may talk.

Both sides send HELLO with a fresh nonce, compare what must be equal, then prove that they know the
cluster secret by an HMAC over role and both nonces. The proof also names its side of the
connection, so it can neither be replayed (nonces) nor reflected (side). It authenticates; it does
not encrypt. Knows byte streams only, no transport; deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from cluster.errors import HandshakeError, WireError
from cluster.types import Incarnation, Role, WorkerId
from cluster.wire import codec
from cluster.wire.messages import PROTOCOL_VERSION, Envelope, Hello, Proof, Refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

NONCE_BYTES = 16
_FAREWELL_S = 1.0

_Kind = TypeVar("_Kind", Hello, Proof)
Side = Literal["client", "server"]  # who opened the connection, who accepted it


@dataclass(frozen=True, slots=True)
class Identity:
    """What one end says of itself in HELLO.

    `layout` must agree between a prefill and a decode worker, field by field: fingerprint, block
    size, KV dtype, layer shapes. Other pairings do not compare it.
    """

    role: Role
    peer: WorkerId
    incarnation: Incarnation
    layout: dict[str, str]


class ByteStream(Protocol):
    """Ordered messages of bytes, both ways; a broken one raises `SessionClosedError`."""

    async def read(self) -> bytes | None:
        """The next message, None at the end of the stream."""

    async def write(self, data: bytes) -> None:
        """Hand one message to the transport, waiting for room."""


class _PeerRefusedError(HandshakeError):
    """The other end found the fault and said so; it needs no answer."""


async def greet_peer(
    stream: ByteStream, me: Identity, secret: bytes, *, expect_incarnation: Incarnation | None
) -> Hello:
    """Handshake of the end that opened the connection; it proves first. Returns the peer's HELLO.

    Raises:
        HandshakeError: One of the two ends refuses the other.
        WireError: The peer spoke out of turn or left.
    """
    mine = make_hello(me)
    theirs = await _exchange_hello(stream, mine)
    try:
        check_hello(mine, theirs, expect_incarnation=expect_incarnation)
        await _write(stream, prove(secret, "client", mine.role, client=mine, server=theirs))
        proof = await _read(stream, Proof)
        check_proof(secret, "server", proof, role=theirs.role, client=mine, server=theirs)
    except _PeerRefusedError:
        raise
    except HandshakeError as error:
        await _refuse(stream, error.message)
        raise
    return theirs


async def accept_peer(stream: ByteStream, me: Identity, secret: bytes) -> Hello:
    """Handshake of the end that accepted the connection. Returns the peer's HELLO.

    Raises:
        HandshakeError: One of the two ends refuses the other.
        WireError: The peer spoke out of turn or left.
    """
    mine = make_hello(me)
    theirs = await _exchange_hello(stream, mine)
    try:
        check_hello(mine, theirs, expect_incarnation=None)
        proof = await _read(stream, Proof)
        check_proof(secret, "client", proof, role=theirs.role, client=theirs, server=mine)
    except _PeerRefusedError:
        raise
    except HandshakeError as error:
        await _refuse(stream, error.message)
        raise
    await _write(stream, prove(secret, "server", mine.role, client=theirs, server=mine))
    return theirs


def make_hello(me: Identity) -> Hello:
    """HELLO of this end with a fresh nonce."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        role=me.role,
        peer=me.peer,
        incarnation=me.incarnation,
        nonce=secrets.token_bytes(NONCE_BYTES),
        layout=dict(me.layout),
    )


def check_hello(mine: Hello, theirs: Hello, *, expect_incarnation: Incarnation | None) -> None:
    """Decide whether the two ends fit.

    Raises:
        HandshakeError: Names each differing field with both values.
    """
    if theirs.protocol != mine.protocol:
        raise HandshakeError(_differs("protocol", str(mine.protocol), theirs, str(theirs.protocol)))
    if len(theirs.nonce) != NONCE_BYTES:
        raise HandshakeError(f"nonce of {theirs.peer} has {len(theirs.nonce)} bytes, not 16")
    if expect_incarnation is not None and theirs.incarnation != expect_incarnation:
        raise HandshakeError(
            f"incarnation of {theirs.peer}: expected {expect_incarnation}, it is now "
            f"{theirs.incarnation}"
        )
    if {mine.role, theirs.role} == {Role.PREFILL, Role.DECODE}:
        _compare_layouts(mine.layout, theirs)


def prove(secret: bytes, side: Side, role: Role, *, client: Hello, server: Hello) -> Proof:
    """Proof by the end on `side` that it knows the secret, bound to this very connection."""
    return Proof(mac=_mac(secret, side, role, client, server))


def check_proof(
    secret: bytes, side: Side, proof: Proof, *, role: Role, client: Hello, server: Hello
) -> None:
    """Verify the proof of the end on `side`.

    Raises:
        HandshakeError: The peer does not know our secret.
    """
    if not hmac.compare_digest(proof.mac, _mac(secret, side, role, client, server)):
        raise HandshakeError("secret: the proof does not match; both ends need the same secret")


def _mac(secret: bytes, side: Side, role: Role, client: Hello, server: Hello) -> bytes:
    text = f"diptych proof {PROTOCOL_VERSION}|{side}|{role.value}|".encode()
    return hmac.new(secret, text + client.nonce + server.nonce, hashlib.sha256).digest()


def _compare_layouts(mine: Mapping[str, str], theirs: Hello) -> None:
    differing = [
        _differs(name, mine.get(name, "absent"), theirs, theirs.layout.get(name, "absent"))
        for name in sorted(mine.keys() | theirs.layout.keys())
        if mine.get(name) != theirs.layout.get(name)
    ]
    if differing:
        raise HandshakeError("; ".join(differing))


def _differs(field: str, mine: str, theirs: Hello, value: str) -> str:
    return f"{field} differs: here {mine}, {theirs.peer} ({theirs.role.value}) has {value}"


async def _refuse(stream: ByteStream, reason: str) -> None:
    """Tell the peer why, and stay until it has read that or a second has passed."""
    with contextlib.suppress(WireError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await _write(stream, Refuse(reason))
            while await stream.read() is not None:
                pass


async def _exchange_hello(stream: ByteStream, mine: Hello) -> Hello:
    await _write(stream, mine)
    return await _read(stream, Hello)


async def _write(stream: ByteStream, body: Hello | Proof | Refuse) -> None:
    await stream.write(codec.pack([codec.encode(Envelope(body))]))


async def _read(stream: ByteStream, kind: type[_Kind]) -> _Kind:
    data = await stream.read()
    if data is None:
        raise WireError("peer left during the handshake")
    envelopes = codec.unpack(data)
    body = envelopes[0].body if len(envelopes) == 1 else None
    if isinstance(body, Refuse):
        raise _PeerRefusedError(body.reason)
    if not isinstance(body, kind):
        raise WireError(f"expected {kind.__name__}, got {type(body).__name__}")
    return body
