"""Connections that send too much, too slowly or no HTTP at all, on the ingress' own listener."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from router.http.listener import HttpListener, bind
from router.http.settings import HttpSettings
from router.http_protocol import BoundedHttpProtocol
from router.ingress import build_app
from tests.support.scripted_flow import FACTS, Script, ScriptedFlow, one_by_one
from tests.support.toy_tokenizers import byte_level

BODY = json.dumps({"model": FACTS.served_name, "prompt": "hi"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


class Impatient(BoundedHttpProtocol):
    head_timeout_s = 0.3


@asynccontextmanager
async def connection():
    """Reader and writer of one connection to a listener."""
    flow = ScriptedFlow(Script(one_by_one("abc")))
    settings = HttpSettings(body_timeout_s=0.3, max_body_bytes=4_096)
    taken = bind("127.0.0.1", 0)
    taken.listen()  # connections wait until the listener runs
    listener = HttpListener(build_app(flow, settings, byte_level()), taken, Impatient)
    task = asyncio.create_task(listener.run())
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        listener.stop(0)
        await asyncio.wait_for(task, 10)


async def until_closed(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of the one answer before the server closes."""
    answer = await asyncio.wait_for(reader.read(), 10)
    if not answer:
        return 0, ""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"", 408, "request_timeout"),
        (HEAD, 408, "request_timeout"),
        (HEAD + b"x-a: " + b"a" * 1_000_000, 431, "headers_too_large"),
        (HEAD + b"".join(b"x-%d: a\r\n" % i for i in range(20_000)), 431, "headers_too_large"),
        (b"\x16\x03\x01 not HTTP\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: -5\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: 50\r\n\r\n{", 408, "request_timeout"),
        (HEAD + b"content-length: 9000\r\n\r\n" + b" " * 9000, 413, "request_too_large"),
    ],
)
async def test_bad_requests_get_an_error_and_the_connection_ends(sent, status, code):
    async with connection() as (reader, writer):
        writer.write(sent)
        try:
            assert await until_closed(reader) == (status, code)
        except ConnectionResetError:  # the answer was lost behind what we had still in flight
            assert status == 431


async def test_a_connection_between_two_requests_may_be_idle_longer():
    async with connection() as (reader, writer):
        request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        for _ in range(2):
            writer.write(request)
            answer = b""
            while b'"total_tokens"' not in answer:
                part = await asyncio.wait_for(reader.read(65536), 10)
                assert part
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):  # nothing comes, the connection stays
                await asyncio.wait_for(reader.read(), 3 * Impatient.head_timeout_s)


async def test_pipelined_requests_are_answered_in_order():
    async with connection() as (reader, writer):
        request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        writer.write(request * 20)
        answer = b""
        while answer.count(b'"total_tokens"') < 20:
            answer += await asyncio.wait_for(reader.read(65536), 10)
        assert answer.count(b"HTTP/1.1 200") == 20
