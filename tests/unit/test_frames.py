"""Frame headers, sizes and checksums; the gate in front of rows; what a commit must say."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import HandoffError, WireError
from cluster.kv.frames import (
    HEADER_BYTES,
    FrameFlags,
    blocks_per_frame,
    frame_size,
    read_header,
    sum64,
    verify_frame,
    write_header,
)
from cluster.kv.staging import RowAccess
from cluster.types import AttemptKey, GenerationJob, RequestId, SamplingParams, TokenDelta
from cluster.wire.messages import Commit, NextFrame
from decode.transfer import IncomingTransfer

ANNOUNCED = NextFrame(
    transfer=3, epoch=2**64 - 1, frame=2, first_block=10, num_blocks=2, num_bytes=HEADER_BYTES + 80
)
KEY = AttemptKey(RequestId("r"), 1)


def make_frame(flags=FrameFlags.CHECKSUM):
    buffer = np.arange(ANNOUNCED.num_bytes, dtype=np.uint8)
    write_header(buffer, ANNOUNCED, flags)
    return buffer


def test_a_frame_verifies_against_its_announcement():
    header = verify_frame(make_frame(), ANNOUNCED)
    assert (header.transfer, header.frame, header.payload_bytes) == (3, 2, 80)
    assert header.epoch == 2**64 - 1


@pytest.mark.parametrize(
    "field", ["transfer", "epoch", "frame", "first_block", "num_blocks", "num_bytes"]
)
def test_each_differing_field_is_named(field):
    other = msgspec.structs.replace(ANNOUNCED, **{field: getattr(ANNOUNCED, field) - 1})
    name = "payload_bytes" if field == "num_bytes" else field
    with pytest.raises(HandoffError, match=name):
        verify_frame(make_frame(), other)


def test_bytes_that_are_no_frame_are_told_by_their_magic():
    with pytest.raises(HandoffError, match="magic"):
        read_header(np.zeros(HEADER_BYTES, dtype=np.uint8))


@given(st.integers(0, 79), st.integers(1, 255))
def test_a_changed_payload_byte_fails_the_checksum(position, change):
    buffer = make_frame()
    buffer[HEADER_BYTES + position] ^= change
    with pytest.raises(HandoffError, match="checksum"):
        verify_frame(buffer, ANNOUNCED)
    empty = make_frame(FrameFlags.NONE)
    empty[HEADER_BYTES + position] ^= change
    verify_frame(empty, ANNOUNCED)  # without the flag nobody looks


@given(st.binary(max_size=100))
def test_sum64_is_the_sum_of_little_endian_words(data):
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    assert sum64(np.frombuffer(data, dtype=np.uint8)) == sum(words) % 2**64


@given(st.integers(0, 1 << 24), st.integers(1, 1 << 22))
def test_a_frame_holds_at_least_one_block_and_else_keeps_its_bound(frame_bytes, block_bytes):
    num_blocks = blocks_per_frame(frame_bytes, block_bytes)
    assert num_blocks >= 1
    assert num_blocks == 1 or frame_size(num_blocks, block_bytes) <= frame_bytes
    assert frame_size(num_blocks + 1, block_bytes) > frame_bytes


def test_row_access_is_quiet_at_once_or_when_the_copy_ends():
    quiet = []
    idle = RowAccess()
    idle.close(lambda: quiet.append("idle"))
    assert quiet == ["idle"]
    assert not idle.enter()

    busy = RowAccess()
    assert busy.enter()
    busy.close(lambda: quiet.append("busy"))
    busy.close(lambda: quiet.append("again"))
    assert quiet == ["idle"]
    assert not busy.enter()
    busy.leave()
    assert quiet == ["idle", "busy"]
    busy.leave()
    assert quiet == ["idle", "busy"]


def make_transfer():
    job = GenerationJob(KEY, tuple(range(70)), SamplingParams(4))
    return IncomingTransfer(1, job, 70, (b"a", b"b", b"c", b"d"), (0,), (5, 6, 7, 8))


def deliver(transfer):
    for frame in (
        NextFrame(transfer=1, epoch=1, frame=0, first_block=1, num_blocks=3, num_bytes=0),
        NextFrame(transfer=1, epoch=1, frame=1, first_block=4, num_blocks=1, num_bytes=0),
    ):
        transfer.announce(frame, 1.0)
        transfer.arrived(frame)


COMMIT = Commit(
    transfer=1,
    key=KEY,
    num_frames=2,
    num_blocks=4,
    num_tokens=70,
    first_output=TokenDelta(KEY, 0, (9,)),
)


def test_frames_name_the_rows_they_go_to():
    transfer = make_transfer()
    frame = NextFrame(transfer=1, epoch=1, frame=0, first_block=1, num_blocks=3, num_bytes=0)
    assert transfer.announce(frame, 1.0) == (5, 6, 7)


@pytest.mark.parametrize(
    ("frame", "first_block", "num_blocks"),
    [(1, 1, 1), (0, 0, 1), (0, 2, 1), (0, 1, 5)],
    ids=["skipped", "before", "gap", "beyond"],
)
def test_a_frame_out_of_place_is_refused(frame, first_block, num_blocks):
    announced = SimpleNamespace(frame=frame, first_block=first_block, num_blocks=num_blocks)
    with pytest.raises(WireError, match="was due"):
        make_transfer().announce(announced, 1.0)


def test_a_commit_settles_only_with_all_announced_frames():
    transfer = make_transfer()
    first = NextFrame(transfer=1, epoch=1, frame=0, first_block=1, num_blocks=4, num_bytes=0)
    transfer.announce(first, 1.0)
    transfer.commit = COMMIT
    assert not transfer.is_settled
    transfer.arrived(first)
    assert transfer.is_settled


def test_a_truthful_commit_verifies():
    transfer = make_transfer()
    deliver(transfer)
    transfer.commit = COMMIT
    transfer.verify()


OTHER = AttemptKey(RequestId("r"), 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key": OTHER}, "key"),
        ({"first_output": TokenDelta(OTHER, 0, (9,))}, "key of token 1"),
        ({"first_output": TokenDelta(KEY, 0, ())}, "output tokens"),
        ({"num_frames": 1}, "frames"),
        ({"num_blocks": 3}, "blocks"),
        ({"num_tokens": 69}, "tokens"),
    ],
)
def test_each_lie_of_a_commit_is_named(change, named):
    transfer = make_transfer()
    deliver(transfer)
    transfer.commit = msgspec.structs.replace(COMMIT, **change)
    with pytest.raises(HandoffError, match=named):
        transfer.verify()


def test_a_commit_that_agrees_with_a_missing_chunk_does_not_verify():
    transfer = make_transfer()
    frame = NextFrame(transfer=1, epoch=1, frame=0, first_block=1, num_blocks=3, num_bytes=0)
    transfer.announce(frame, 1.0)
    transfer.arrived(frame)
    transfer.commit = msgspec.structs.replace(COMMIT, num_frames=1, num_blocks=3)
    with pytest.raises(HandoffError, match="blocks needed 3, expected 4"):
        transfer.verify()
