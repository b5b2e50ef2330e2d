"""The bench client against a scripted server: what it times, counts and refuses."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from cluster.bench.client import (
    BenchError,
    Endpoint,
    Tally,
    encode_request,
    open_streams,
    run_burst,
)

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def block(value: object) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def text(content: str) -> bytes:
    return block({"choices": [{"index": 0, "text": content}], "usage": None})


def end(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    return block({"choices": [], "usage": usage}) + block(b"[DONE]") + b"0\r\n\r\n"


@asynccontextmanager
async def serving(*answer: bytes):
    """A server that sends each connection the same answer; yields where, and the bodies it got."""
    bodies: list[dict] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        for part in answer:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "m"), bodies


async def test_a_burst_is_timed_and_counted():
    answer = (HEAD, text("a"), text("b"), text(""), end(2))
    async with serving(*answer) as (endpoint, bodies):
        traces = await run_burst(endpoint, [[5, 6], [7]], 2, 5.0)
    assert sorted(body["prompt"] for body in bodies) == [[5, 6], [7]]
    assert all(body["ignore_eos"] and body["max_tokens"] == 2 for body in bodies)
    for trace in traces:
        assert len(trace.chunk_s) == trace.num_tokens == 2  # an empty text is no token
        assert trace.ttft_s > 0
        assert trace.tpot_s is not None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ((b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno",), "answer 503: no"),
        ((HEAD, text("a"), block({"error": {"message": "lost"}})), "lost"),
        ((HEAD, text("a")), "closed within"),
        ((HEAD, text("a"), b"0\r\n\r\n"), "answer 200"),
        ((HEAD, text("a"), end(1)), r"asked for 2 tokens, got \[1\]"),
        ((HEAD, block(b"{nonsense")), "unreadable"),
    ],
)
async def test_a_failed_answer_ends_the_measurement(answer: tuple[bytes, ...], complaint: str):
    async with serving(*answer) as (endpoint, _):
        with pytest.raises(BenchError, match=complaint):
            await run_burst(endpoint, [[1]], 2, 5.0)


async def test_a_tally_counts_streams_that_are_left_alone():
    async with serving(HEAD, text("a"), text("b")) as (endpoint, _):
        tally = Tally()
        streams = await open_streams(endpoint, 3, tally)
        for stream in streams:
            stream.send(encode_request(endpoint, [1], 9))
        for stream in streams:
            with pytest.raises(BenchError):
                await stream.finished(5.0)
    assert (tally.num_started, tally.num_chunks) == (3, 6)


async def test_nobody_listening_is_one_error():
    async with serving() as (endpoint, _):
        pass
    with pytest.raises(BenchError, match="cannot connect"):
        await open_streams(endpoint, 1)
