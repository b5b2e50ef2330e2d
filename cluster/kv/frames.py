"""The unit of the data plane: a 64-byte header followed by whole KV rows, in one buffer.

The header repeats what NEXT announced on the session, so that a receiver can tell a frame of
another epoch, transfer or position from the one it waits for: on most planes order is the only
other protection. `sum64` detects torn or short rows, not rows that changed places. Pure: buffers
in, values out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import HandoffError
from cluster.types import TransferId

if TYPE_CHECKING:
    import numpy.typing as npt

    from cluster.wire.messages import NextFrame

HEADER_BYTES = 64
_MAGIC = b"DIPTYCH1"
# magic, epoch, transfer, frame, first_block, num_blocks, flags, payload_bytes, checksum, padding
_HEADER = struct.Struct("<8sQQIIIIQQ8x")
assert _HEADER.size == HEADER_BYTES


class FrameFlags(IntFlag):
    """Properties of one frame."""

    NONE = 0
    CHECKSUM = 1  # `checksum` is sum64 of the payload
    EMPTY = 2  # announced, then given up: the payload means nothing


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """First 64 bytes of a frame, little endian."""

    epoch: int
    transfer: TransferId
    frame: int  # 0-based within the transfer
    first_block: int  # index within the sequence
    num_blocks: int
    payload_bytes: int
    flags: FrameFlags
    checksum: int = 0


def blocks_per_frame(frame_bytes: int, block_bytes: int) -> int:
    """Rows of a full frame: as many as fit `frame_bytes` with the header, at least one."""
    return max(1, (frame_bytes - HEADER_BYTES) // block_bytes)


def frame_size(num_blocks: int, block_bytes: int) -> int:
    """Bytes of a frame that carries `num_blocks` rows."""
    return HEADER_BYTES + num_blocks * block_bytes


def sum64(payload: npt.NDArray[np.uint8]) -> int:
    """Sum of the payload's little-endian 64-bit words modulo 2**64; a short tail is padded by 0."""
    whole = len(payload) // 8 * 8
    total = int(payload[:whole].view("<u8").sum(dtype=np.uint64))
    tail = int.from_bytes(payload[whole:].tobytes(), "little")
    return (total + tail) % 2**64


def write_header(buffer: npt.NDArray[np.uint8], announced: NextFrame, flags: FrameFlags) -> None:
    """Fill in the header of a frame whose payload is in place; `buffer` is the whole frame."""
    payload = buffer[HEADER_BYTES:]
    _HEADER.pack_into(
        buffer.data,
        0,
        _MAGIC,
        announced.epoch,
        announced.transfer,
        announced.frame,
        announced.first_block,
        announced.num_blocks,
        int(flags),
        len(payload),
        sum64(payload) if FrameFlags.CHECKSUM in flags else 0,
    )


def read_header(buffer: npt.NDArray[np.uint8]) -> FrameHeader:
    """Parse the header of a received frame.

    Raises:
        HandoffError: These bytes do not start a frame.
    """
    magic, epoch, transfer, frame, first, num, flags, payload_bytes, checksum = _HEADER.unpack_from(
        buffer.data
    )
    if magic != _MAGIC:
        raise HandoffError(f"frame starts with {magic!r} instead of its magic")
    return FrameHeader(
        epoch, TransferId(transfer), frame, first, num, payload_bytes, FrameFlags(flags), checksum
    )


def verify_frame(buffer: npt.NDArray[np.uint8], announced: NextFrame) -> FrameHeader:
    """Check that a received frame is the announced one, whole and untorn.

    Raises:
        HandoffError: Names the field that differs and both values.
    """
    header = read_header(buffer)
    expected = (
        ("epoch", header.epoch, announced.epoch),
        ("transfer", header.transfer, announced.transfer),
        ("frame", header.frame, announced.frame),
        ("first_block", header.first_block, announced.first_block),
        ("num_blocks", header.num_blocks, announced.num_blocks),
        ("payload_bytes", header.payload_bytes, announced.num_bytes - HEADER_BYTES),
    )
    for field, got, wanted in expected:
        if got != wanted:
            raise HandoffError(f"frame {field} is {got}, announced was {wanted}")
    if FrameFlags.CHECKSUM in header.flags and FrameFlags.EMPTY not in header.flags:
        found = sum64(buffer[HEADER_BYTES:])
        if found != header.checksum:
            raise HandoffError(
                f"frame checksum is {found:#x}, its header says {header.checksum:#x}"
            )
    return header
