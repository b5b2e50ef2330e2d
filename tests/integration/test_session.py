"""Sessions between real ends: handshake, order, calls, liveness, hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import sys
import time

import grpc
import pytest

from cluster.errors import DeadlineError, HandshakeError, SessionClosedError, WireError
from cluster.types import AttemptKey, Incarnation, RequestId, Role, WorkerId
from cluster.wire import codec
from cluster.wire.messages import Accepted, Cancel, Envelope, Hello, StoreSet
from cluster.wire.session import Identity, SessionOptions, SessionServer, connect
from tests.support.recorder import Recorder
from tests.support.session_peer import LAYOUT

OPTIONS = SessionOptions(b"secret", heartbeat_s=0.1, dead_after_s=0.6, max_message_bytes=1 << 20)
KEY = AttemptKey(RequestId("r"), 1)


def identity(role=Role.PREFILL, incarnation="i1", **layout):
    return Identity(role, WorkerId(f"{role.value}-0"), Incarnation(incarnation), LAYOUT | layout)


def echo(session, body, call):
    if call is not None:
        session.send(Accepted(body.key), reply_to=call)


@contextlib.asynccontextmanager
async def serving(handler, me=None, options=OPTIONS):
    server = SessionServer(me or identity(Role.DECODE, "d1"), handler, options)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()


async def dial(address, handler=None, me=None, options=OPTIONS, expect=None):
    return await connect(
        address,
        me or identity(),
        handler or Recorder(),
        options,
        expect_incarnation=expect,
        timeout_s=5,
    )


async def test_calls_and_order_across_a_session():
    there = Recorder(echo)
    async with serving(there) as address:
        here = Recorder()
        session = await dial(address, here)
        assert session.peer.peer == "decode-0"
        for attempt in range(500):
            session.send(Cancel(AttemptKey(RequestId("r"), attempt)))
        assert await session.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        assert [body.key.attempt for body in there.of("received")] == [*range(500), 1]
        session.close("done")
        await there.until(lambda: there.of("closed"))
        await here.until(lambda: here.of("closed"))
        assert here.of("closed") == ["done"]
        assert there.events[0] == ("opened", "prefill-0")
        assert len(there.of("closed")) == 1


async def test_messages_of_one_tick_share_a_write():
    there = Recorder()
    async with serving(there) as address:
        session = await dial(address)
        writes = []
        write = session._stream.write

        async def counting(data):
            writes.append(data)
            await write(data)

        session._stream.write = counting
        for attempt in range(100):
            session.send(Cancel(AttemptKey(RequestId("r"), attempt)))
        await there.until(lambda: len(there.of("received")) == 100)
        assert len([data for data in writes if len(codec.unpack(data)) > 1]) == 1
        session.close("done")


@pytest.mark.parametrize(
    ("me", "field"),
    [
        (identity(block_size="32"), "block_size differs: here 32, decode-0 (decode) has 16"),
        (identity(kv_dtype="bfloat16"), "kv_dtype differs: here bfloat16"),
        (identity(rope="yarn"), "rope differs: here yarn, decode-0 (decode) has absent"),
    ],
)
async def test_layout_mismatch_is_refused_by_name_on_both_sides(me, field, caplog):
    there = Recorder()
    async with serving(there) as address:
        with pytest.raises(HandshakeError) as refusal:
            await dial(address, me=me)
        assert field in refusal.value.message
    assert there.events == []
    name = field.split(" ", maxsplit=1)[0]
    assert f"{name} differs" in caplog.text  # the accepting end says it too


async def test_an_ingress_does_not_compare_layouts():
    async with serving(Recorder()) as address:
        me = Identity(Role.INGRESS, WorkerId("ingress"), Incarnation("x"), {})
        session = await dial(address, me=me)
        assert session.peer.layout == LAYOUT
        session.close("done")


async def test_wrong_secret_is_refused():
    there = Recorder()
    async with serving(there) as address:
        with pytest.raises(HandshakeError, match="secret"):
            await dial(address, options=SessionOptions(b"other"))
    assert there.events == []


async def test_a_successor_is_not_taken_for_the_expected_worker():
    async with serving(Recorder()) as address:
        with pytest.raises(HandshakeError, match="expected d0, it is now d1"):
            await dial(address, expect=Incarnation("d0"))
        session = await dial(address, expect=Incarnation("d1"))
        session.close("done")


async def test_nobody_listening_is_a_closed_session():
    async with serving(Recorder()) as address:
        pass
    with pytest.raises(SessionClosedError):
        await dial(address)


async def test_an_idle_session_outlives_dead_after():
    there, here = Recorder(echo), Recorder()
    async with serving(there) as address:
        session = await dial(address, here)
        with pytest.raises(TimeoutError):
            await here.until(lambda: here.of("closed"), timeout_s=OPTIONS.dead_after_s * 3)
        assert await session.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        session.close("done")


async def test_unanswered_call_ends_by_its_deadline_and_the_late_answer_is_dropped():
    calls = []
    there = Recorder(lambda session, body, call: calls.append((session, body, call)))
    async with serving(there) as address:
        here = Recorder()
        session = await dial(address, here)
        with pytest.raises(DeadlineError, match="Cancel"):
            await session.call(Cancel(KEY), timeout_s=0.1)
        server_end, body, call = calls[0]
        server_end.send(Accepted(body.key), reply_to=call)
        server_end.send(Cancel(KEY))
        await here.until(lambda: here.of("received"))
        assert here.of("received") == [Cancel(KEY)]
        assert session.num_late_answers == 1
        session.close("done")


async def test_closing_fails_open_calls_at_once():
    there = Recorder(lambda session, body, call: session.close("told to"))
    async with serving(there) as address:
        session = await dial(address)
        with pytest.raises(SessionClosedError):
            await session.call(Cancel(KEY), timeout_s=60)
        with pytest.raises(SessionClosedError):
            session.send(Cancel(KEY))


async def test_a_failing_handler_costs_its_session_only(caplog):
    def fail(session, body, call):
        raise RuntimeError("a bug in a handler")

    there = Recorder(fail)
    async with serving(there) as address:
        here = Recorder()
        session = await dial(address, here)
        session.send(Cancel(KEY))
        await here.until(lambda: here.of("closed"))
        await there.until(lambda: there.of("closed"))
        assert "a bug in a handler" in caplog.text
        again = await dial(address)
        again.close("done")


async def test_what_was_sent_before_closing_still_arrives():
    def last_words(session, body, call):
        for _ in range(200):
            session.send(Accepted(body.key))
        session.close("that was all")

    there = Recorder(last_words)
    async with serving(there) as address:
        here = Recorder()
        session = await dial(address, here)
        session.send(Cancel(KEY))
        await here.until(lambda: here.of("closed"))
        assert len(here.of("received")) == 200
        assert there.of("closed") == ["that was all"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xc1garbage",
        codec.pack([b"\x83\xa4body\x81\xa4type\xa6Nobody"]),
        codec.pack([codec.encode(Envelope(Hello(1, Role.PREFILL, WorkerId("x"), "y", b"", {})))]),
        b"x" * (4 << 20),
    ],
    ids=["malformed", "unknown tag", "hello again", "oversized"],
)
async def test_a_bad_message_closes_just_that_session(garbage):
    there = Recorder(echo)
    async with serving(there) as address:
        good, bad_end = await dial(address), Recorder()
        bad = await dial(address, bad_end)
        bad._outbox.append(garbage)  # past the codec: `pack` splices bytes as they are
        bad._outbox_filled.set()
        await bad_end.until(lambda: bad_end.of("closed"))
        await there.until(lambda: len(there.of("closed")) == 1)
        assert await good.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        good.close("done")


async def test_a_message_over_the_limit_is_refused_before_it_leaves():
    async with serving(Recorder(echo)) as address:
        session = await dial(address)
        with pytest.raises(WireError, match="StoreSet"):
            session.send(StoreSet(1, "k", b"x" * (1 << 20)))
        assert await session.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        session.close("done")


async def test_a_peer_that_does_not_read_costs_a_bounded_queue():
    async with serving(Recorder()) as address:
        here = Recorder()
        options = SessionOptions(b"secret", max_queued_bytes=100_000)
        session = await dial(address, here, options=options)
        for _ in range(9):
            session.send(StoreSet(1, "k", b"x" * 10_000))
        with pytest.raises(SessionClosedError, match="too slowly"):
            session.send(StoreSet(1, "k", b"x" * 10_000))
        await here.until(lambda: here.of("closed"))


async def test_random_bytes_and_silence_on_the_port_harm_nobody():
    there = Recorder(echo)
    async with serving(there) as address:
        session = await dial(address)
        host, port = address.rsplit(":", 1)
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        for _reader, writer in strangers[:3]:
            writer.write(os.urandom(4096))
        for reader, _writer in strangers:  # the noisy ones at once, the silent ones in 5 s
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(15):
                    while await reader.read(65536):
                        pass
        assert await session.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        for _reader, writer in strangers:
            writer.close()
        session.close("done")


async def test_a_client_that_never_says_hello_is_dropped():
    there = Recorder()
    async with serving(there) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/diptych.Session/Open")()
        assert await call.read() is not grpc.aio.EOF  # the server's HELLO
        started_s = time.monotonic()
        async with asyncio.timeout(20):
            assert await call.read() is grpc.aio.EOF
        assert time.monotonic() - started_s > 3
    assert there.events == []


async def test_handlers_run_outside_the_context_that_opened_the_session():
    variable = contextvars.ContextVar("request", default="none")
    seen = []

    class Spy(Recorder):
        def opened(self, session):
            seen.append(variable.get())
            super().opened(session)

        def closed(self, session, reason):
            seen.append(variable.get())
            super().closed(session, reason)

    async with serving(Spy()) as address:
        variable.set("inside a request")
        here = Spy()
        session = await dial(address, here)
        session.close("done")
        await here.until(lambda: here.of("closed"))
    assert set(seen) == {"none"}


@contextlib.asynccontextmanager
async def peer_process(heartbeat_s=0.1, dead_after_s=0.6):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.session_peer",
        str(heartbeat_s),
        str(dead_after_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()


async def test_a_killed_peer_is_noticed_at_once():
    async with peer_process(1.0, 30.0) as (process, address):
        here = Recorder()
        await dial(address, here, options=SessionOptions(b"secret", 1.0, 30.0))
        started_s = time.monotonic()
        process.kill()
        await here.until(lambda: here.of("closed"))
        assert time.monotonic() - started_s < 2


async def test_a_stopped_peer_is_noticed_and_expires_its_own_session():
    async with peer_process() as (process, address):
        here = Recorder()
        await dial(address, here)
        assert await process.stdout.readline() == b"opened\n"
        started_s = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        await here.until(lambda: here.of("closed"))
        assert time.monotonic() - started_s < OPTIONS.dead_after_s + 1
        assert "silent" in here.of("closed")[0]
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            assert (await process.stdout.readline()).startswith(b"closed")
            again = await dial(address)  # and it is usable afterwards
            assert await again.call(Cancel(KEY), timeout_s=5) == Accepted(KEY)
        again.close("done")


async def test_a_process_that_stood_still_expires_its_sessions_first():
    async with peer_process(0.1, 30.0) as (_process, address):
        here = Recorder()
        await dial(address, here)
        time.sleep(OPTIONS.dead_after_s * 2)  # noqa: ASYNC251 - stands for being stopped
        await here.until(lambda: here.of("closed"))
        assert "stood still" in here.of("closed")[0]
