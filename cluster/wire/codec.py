"""Bytes of a session: several envelopes in one stream message, msgpack, never pickle.

Encoders and decoders are built once, because building one costs more than using it. A stream
message is a msgpack array of envelopes, so whatever was queued in one loop tick can leave in one
write. Anything the decoder does not know (a tag, a type, a truncated array) is a `WireError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.errors import WireError
from cluster.wire.messages import Envelope

if TYPE_CHECKING:
    from collections.abc import Sequence

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Envelope, ...])

# An array header of msgpack takes at most this many bytes.
ARRAY_HEADER_BYTES = 5


def encode(envelope: Envelope) -> bytes:
    """One envelope as the bytes that `pack` puts side by side."""
    return _encoder.encode(envelope)


def pack(encoded: Sequence[bytes]) -> bytes:
    """Join encoded envelopes into one stream message."""
    return _encoder.encode([msgspec.Raw(one) for one in encoded])


def unpack(data: bytes) -> tuple[Envelope, ...]:
    """Decode one stream message.

    Raises:
        WireError: The bytes are no array of envelopes that this version knows.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed message: {error}") from error
