"""The bench client reads the same events however the network cuts the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.sse_reader import ResponseError, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BLOCKS = (
    b'data: {"a":1}\n\n',
    b": keep-alive\n\n",
    b'data: {"b":"x\\ny"}\n\n',
    b"data: [DONE]\n\n",
)
PAYLOADS = [b'{"a":1}', b'{"b":"x\\ny"}', b"[DONE]"]


def chunked(parts: tuple[bytes, ...]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read(data: bytes, cuts: list[int]) -> tuple[list[bytes], ResponseReader]:
    reader = ResponseReader()
    edges = [0, *sorted(cuts), len(data)]
    events = []
    for start, end in itertools.pairwise(edges):
        events += reader.feed(data[start:end])
    return events, reader


STREAM = HEAD + chunked(BLOCKS)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_were_cut(cuts: list[int]):
    events, reader = read(STREAM, cuts)
    assert events == PAYLOADS
    assert reader.is_complete


def test_a_block_may_span_http_chunks_and_a_chunk_hold_several_blocks():
    joined = b"".join(BLOCKS)
    events, _ = read(HEAD + chunked((joined[:7], joined[7:40], joined[40:])), [])
    assert events == PAYLOADS


def test_an_error_answer_is_text_and_no_event():
    body = b'{"error":{"message":"no"}}'
    data = b"HTTP/1.1 503 Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    events, reader = read(data, [20, 50])
    assert events == []
    assert (reader.status, reader.text, reader.is_complete) == (503, body.decode(), True)


def test_an_incomplete_answer_is_not_complete():
    _, reader = read(STREAM[:-5], [])
    assert not reader.is_complete


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", HEAD + b"zz\r\n"])
def test_anything_else_is_refused(data: bytes):
    with pytest.raises(ResponseError):
        ResponseReader().feed(data)
