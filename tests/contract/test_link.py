"""What every data plane must make true of a link, tried with both ends in one process.

A plane joins by adding a maker of connected pairs to `PLANES`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.errors import HandoffError, WireError
from cluster.kv.fabric import RECEIVER_RANK, SENDER_RANK, GlooPlane, SessionStore
from cluster.kv.frames import blocks_per_frame, frame_size
from cluster.kv.incoming import ReceivingLink
from cluster.kv.layout import KvLayout, LayerShape
from cluster.kv.link import LinkState
from cluster.kv.outgoing import Outgoing, SendingLink
from cluster.kv.pool import KvPool
from cluster.kv.staging import RowAccess
from cluster.types import TransferId
from cluster.wire.messages import NextFrame

LAYOUT = KvLayout((LayerShape(2, 8, 2, 8),), "float32", 16)  # 2 KiB a block
FRAME_BYTES = 10_000  # four blocks a frame
NUM_BLOCKS = 64


def gloo_planes(timeout_s=5.0):
    stores = []
    for other in (1, 0):
        stores.append(
            SessionStore(lambda key, value, to=other: stores[to].put(key, value), timeout_s)
        )
    ranks = (SENDER_RANK, RECEIVER_RANK)
    return [GlooPlane(store, rank, "127.0.0.1") for store, rank in zip(stores, ranks, strict=True)]


PLANES = {"gloo": gloo_planes}


class Pair:
    """Two links whose NEXT messages travel by a call instead of a session."""

    def __init__(self, planes, epoch=77):
        self.rng = np.random.default_rng(1)
        self.source, self.target = (KvPool(LAYOUT, NUM_BLOCKS) for _ in range(2))
        self.source.rows.numpy()[:] = self.rng.integers(0, 256, self.source.rows.shape, np.uint8)
        self.frames, self.broken, self.announced = [], {}, []
        self.changed = asyncio.Event()
        slot_bytes = frame_size(
            blocks_per_frame(FRAME_BYTES, LAYOUT.block_bytes), LAYOUT.block_bytes
        )
        self.gates = {}  # transfer -> (rows, access) of the receiver
        self.sender = SendingLink(
            SimpleNamespace(peer=SimpleNamespace(peer="d"), send=self._next),
            epoch,
            planes[0],
            self.source,
            slot_bytes=slot_bytes,
            checksum=True,
            on_ready=self._note,
            on_broken=lambda reason: self._note_broken("sender", reason),
        )
        self.receiver = ReceivingLink(
            "p",
            epoch,
            planes[1],
            self.target,
            slot_bytes=slot_bytes,
            on_frame=self._frame,
            on_broken=lambda reason: self._note_broken("receiver", reason),
        )

    async def __aenter__(self):
        self.sender.open()
        self.receiver.open()
        await self.until(lambda: self.sender.state is self.receiver.state is LinkState.READY)
        return self

    async def __aexit__(self, *_exc):
        for link in (self.sender, self.receiver):
            link.close()
            link.fail("the test is over")
            await asyncio.wait_for(link.ended.wait(), 10)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                waiter = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait([waiter], timeout=0.05)
                waiter.cancel()

    def outgoing(self, number, rows, target_rows):
        transfer = Outgoing(TransferId(number), tuple(rows))
        transfer.accept(0)
        self.gates[number] = (target_rows, RowAccess())
        self.sender.add(transfer, self._note)
        return transfer

    def complete(self, transfer):
        transfer.ready_blocks = len(transfer.rows)
        transfer.is_complete = True
        self.sender.pump()

    def moved(self, number):
        return sum(f.num_blocks for f, moved in self.frames if moved and f.transfer == number)

    def same(self, source_rows, target_rows):
        return np.array_equal(
            self.source.rows.numpy()[source_rows], self.target.rows.numpy()[target_rows]
        )

    def _next(self, announced):
        self.announced.append(announced)
        rows, access = self.gates.get(announced.transfer, ((), None))
        first = announced.first_block
        self.receiver.expect(announced, rows[first : first + announced.num_blocks], access)

    def _frame(self, announced, moved):
        self.frames.append((announced, moved))
        self._note()

    def _note_broken(self, which, reason):
        self.broken[which] = reason
        self._note()

    def _note(self):
        self.changed.set()


@pytest.fixture(params=PLANES)
def make_planes(request):
    return PLANES[request.param]


async def test_rows_arrive_where_they_belong(make_planes):
    async with Pair(make_planes()) as pair:
        source, target = [9, 2, 40, 11, 5, 63], [1, 0, 7, 30, 31, 2]
        pair.complete(pair.outgoing(1, source, target))
        await pair.until(lambda: pair.moved(1) == 6)
        assert pair.same(source, target)
        assert pair.sender.bytes_sent == pair.receiver.bytes_received == 6 * LAYOUT.block_bytes
        untouched = [row for row in range(NUM_BLOCKS) if row not in target]
        assert not pair.target.rows.numpy()[untouched].any()


async def test_rows_leave_as_soon_as_they_are_ready(make_planes):
    async with Pair(make_planes()) as pair:
        rows = list(range(12))
        transfer = pair.outgoing(1, rows, rows)
        for ready in (1, 5, 6):
            transfer.ready_blocks = ready
            pair.sender.pump()
            await pair.until(lambda ready=ready: pair.moved(1) == ready)
        pair.complete(transfer)
        await pair.until(lambda: pair.moved(1) == 12)
        assert [(f.frame, f.first_block, f.num_blocks) for f in pair.announced] == [
            (0, 0, 1),
            (1, 1, 4),
            (2, 5, 1),
            (3, 6, 4),
            (4, 10, 2),
        ]
        assert pair.same(rows, rows)


async def test_a_finished_prompt_goes_first_and_equals_take_turns(make_planes):
    async with Pair(make_planes()) as pair:
        pair.sender.state = LinkState.DRAINING  # collect before anything is announced
        computing = pair.outgoing(1, range(16), range(16))
        computing.ready_blocks = 16
        for number, first in ((2, 16), (3, 32)):
            pair.complete(pair.outgoing(number, range(first, first + 16), range(first, first + 16)))
        pair.sender.state = LinkState.READY
        pair.sender.pump()
        await pair.until(lambda: all(pair.moved(number) == 16 for number in (1, 2, 3)))
        assert [f.transfer for f in pair.announced] == [2, 3] * 4 + [1] * 4


async def test_at_most_three_frames_are_announced_ahead(make_planes):
    async with Pair(make_planes()) as pair:
        pair.complete(pair.outgoing(1, range(64), range(64)))
        assert len(pair.announced) == 3
        await pair.until(lambda: pair.moved(1) == 64)
        assert pair.same(range(64), range(64))


async def test_giving_up_keeps_the_link_and_leaves_rows_alone(make_planes):
    async with Pair(make_planes()) as pair:
        transfer = pair.outgoing(1, range(16), range(16))
        pair.complete(transfer)  # three frames of four are announced, none has left
        quiet = []
        pair.sender.remove(transfer)
        transfer.access.close(lambda: quiet.append("sender"))
        pair.gates[1][1].close(lambda: quiet.append("receiver"))
        pair.complete(pair.outgoing(2, range(16, 24), range(16, 24)))
        await pair.until(lambda: pair.moved(2) == 8)
        assert sorted(quiet) == ["receiver", "sender"]
        assert len([f for f in pair.announced if f.transfer == 1]) == 3
        before = pair.moved(1)
        written = pair.target.rows.numpy()[:16].any(axis=1).sum()
        assert written == before  # nothing was written after the gate closed
        assert pair.same(range(16, 24), range(16, 24))
        assert pair.broken == {}


async def test_an_empty_frame_writes_nothing(make_planes):
    async with Pair(make_planes()) as pair:
        pair.sender.state = LinkState.DRAINING
        transfer = pair.outgoing(1, range(8), range(8))
        transfer.access.close(lambda: None)  # given up before any gather
        pair.sender.state = LinkState.READY
        pair.complete(transfer)
        await pair.until(lambda: len(pair.frames) == 2 and pair.sender.num_queued == 0)
        assert pair.moved(1) == 0
        assert not pair.target.rows.numpy().any()
        assert pair.sender.bytes_sent == 0


async def test_a_frame_that_is_not_the_announced_one_breaks_the_link(make_planes):
    async with Pair(make_planes()) as pair:
        pair.receiver.epoch += 1
        real = pair._next

        def lie(announced):
            real(
                NextFrame(
                    transfer=announced.transfer,
                    epoch=announced.epoch + 1,
                    frame=announced.frame,
                    first_block=announced.first_block,
                    num_blocks=announced.num_blocks,
                    num_bytes=announced.num_bytes,
                )
            )

        pair.sender._session.send = lie
        pair.complete(pair.outgoing(1, range(4), range(4)))
        await pair.until(lambda: "receiver" in pair.broken)
        assert "epoch" in pair.broken["receiver"]
        assert pair.receiver.state is LinkState.BROKEN
        assert not pair.target.rows.numpy().any()


async def test_a_changed_byte_breaks_the_link_before_any_row_is_written(make_planes):
    async with Pair(make_planes()) as pair:
        post = pair.sender._plane.post_send

        def tamper(buffer):
            buffer[100] += 1
            return post(buffer)

        pair.sender._plane.post_send = tamper
        pair.complete(pair.outgoing(1, range(4), range(4)))
        await pair.until(lambda: "receiver" in pair.broken)
        assert "checksum" in pair.broken["receiver"]
        assert not pair.target.rows.numpy().any()


@pytest.mark.parametrize("change", [-1, 1, 2048])
async def test_a_wrong_size_is_refused_before_it_is_posted(make_planes, change):
    async with Pair(make_planes()) as pair:
        size = frame_size(2, LAYOUT.block_bytes) + change
        frame = NextFrame(
            transfer=1, epoch=77, frame=0, first_block=0, num_blocks=2, num_bytes=size
        )
        with pytest.raises(WireError, match="are needed"):
            pair.receiver.expect(frame, (0, 1), RowAccess())
        pair.complete(pair.outgoing(1, range(4), range(4)))
        await pair.until(lambda: pair.moved(1) == 4)  # nothing was harmed


async def test_announcements_without_data_are_bounded(make_planes):
    async with Pair(make_planes()) as pair:
        size = frame_size(1, LAYOUT.block_bytes)

        def flood():
            for frame in range(100):
                pair.receiver.expect(
                    NextFrame(
                        transfer=9,
                        epoch=77,
                        frame=frame,
                        first_block=0,
                        num_blocks=1,
                        num_bytes=size,
                    ),
                    (),
                    None,
                )

        with pytest.raises(WireError, match="announced already"):
            flood()


async def test_a_frame_that_never_comes_breaks_the_link_by_its_deadline(make_planes, monkeypatch):
    monkeypatch.setattr("cluster.kv.link.FRAME_TIMEOUT_S", 0.3)
    async with Pair(make_planes()) as pair:
        size = frame_size(1, LAYOUT.block_bytes)
        pair.receiver.expect(
            NextFrame(transfer=1, epoch=77, frame=0, first_block=0, num_blocks=1, num_bytes=size),
            (0,),
            RowAccess(),
        )
        await pair.until(lambda: "receiver" in pair.broken)
        pair.complete(pair.outgoing(2, range(4), range(4)))
        await pair.until(lambda: "sender" in pair.broken)  # the other end learns it too
        assert "/" not in "".join(pair.broken.values())  # no source path of some build machine
        assert pair.sender.state is pair.receiver.state is LinkState.BROKEN


async def test_a_peer_that_never_joins_ends_the_link(make_planes, monkeypatch):
    monkeypatch.setattr("cluster.kv.link.CONNECT_TIMEOUT_S", 0.3)
    pair = Pair(make_planes(timeout_s=0.3))
    pair.sender.open()
    await pair.until(lambda: "sender" in pair.broken)
    await asyncio.wait_for(pair.sender.ended.wait(), 10)
    assert pair.sender.state is LinkState.BROKEN


async def test_closing_finishes_what_is_queued(make_planes):
    async with Pair(make_planes()) as pair:
        pair.complete(pair.outgoing(1, range(12), range(12)))
        pair.sender.close()
        assert pair.sender.state is LinkState.DRAINING
        await asyncio.wait_for(pair.sender.ended.wait(), 10)
        await pair.until(lambda: pair.moved(1) == 12)
        assert pair.sender.state is LinkState.CLOSED
        assert pair.same(range(12), range(12))


async def test_links_leave_no_thread_and_no_descriptor_behind(make_planes):
    def in_use():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    async def once(number):
        async with Pair(make_planes(), epoch=number) as pair:
            pair.complete(pair.outgoing(1, range(4), range(4)))
            await pair.until(lambda: pair.moved(1) == 4)

    for number in range(5):
        await once(number)
    before = in_use()
    tasks_before = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    for number in range(50):
        await once(number)
    threads, fds = in_use()
    assert threads <= before[0] + 2  # those of the last pair may still be on their way out
    assert fds <= before[1] + 1
    assert len(os.listdir("/proc/self/task")) <= tasks_before + 3  # noqa: PTH208


def test_a_store_that_lost_its_peer_wakes_whoever_waits():
    store = SessionStore(lambda key, value: None, 30)
    threading.Timer(0.05, store.fail, ["the session closed"]).start()
    with pytest.raises(ConnectionError, match="the session closed"):
        store.get("0/1")


def test_a_plane_without_its_peer_is_an_error_of_ours():
    plane = GlooPlane(SessionStore(lambda key, value: None, 0.1), SENDER_RANK, "127.0.0.1")
    with pytest.raises(HandoffError, match="did not join"):
        plane.connect(0.1)
