"""The client of the benches: streamed completions on raw asyncio transports.

One connection a request. Times are this process's own, taken when bytes arrive: a request starts
when its last byte is handed to the socket of an open connection, and a token counts when its
chunk has been read. A request that fails, or ends with another number of tokens than asked for,
is an error: a bench never averages over failures.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from cluster.bench.sse_reader import ResponseReader
from cluster.clock import monotonic_s
from cluster.errors import DiptychError

if TYPE_CHECKING:
    from collections.abc import Sequence

DONE = b"[DONE]"
CONNECT_TIMEOUT_S = 10.0


class BenchError(DiptychError):
    """A measurement cannot be made; the run ends."""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens and what it calls its model."""

    host: str
    port: int
    model: str

    @staticmethod
    def of(url: str, model: str) -> Endpoint:
        """From "http://host:port"."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return Endpoint(parts.hostname, parts.port, model)


@dataclass(slots=True)
class Tally:
    """Content chunks of any number of streams; a chunk is a token unless the client lags."""

    num_chunks: int = 0
    num_started: int = 0  # streams with at least one chunk


@dataclass(slots=True)
class Trace:
    """One answer as the client saw it; monotonic seconds."""

    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)  # arrival of each chunk with text
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From the request's last byte to the first text."""
        return self.chunk_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None if there is no second."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)


class Stream(asyncio.Protocol):
    """One connection that carries one streamed completion."""

    def __init__(self, tally: Tally | None = None) -> None:
        """`tally` also counts the chunks."""
        self.trace = Trace()
        self._tally = tally
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; nothing is sent yet."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        """Send the request: the clock starts."""
        assert self._transport is not None
        self._transport.write(request)
        self.trace.sent_s = monotonic_s()

    def data_received(self, data: bytes) -> None:
        """Count the chunks in these bytes."""
        now_s = monotonic_s()
        try:
            for payload in self._reader.feed(data):
                self._take(payload, now_s)
        except (DiptychError, msgspec.DecodeError) as error:
            self._end(BenchError(f"unreadable answer: {error}"))
        if self._reader.is_complete and not self._over.done():
            self._end(BenchError(f"answer {self._reader.status}: {self._reader.text[:300]}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed before the end mark."""
        self._end(BenchError("the connection was closed within an answer"))

    async def finished(self, timeout_s: float) -> Trace:
        """Wait for the end of the answer.

        Raises:
            BenchError: it failed, or has not ended within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._over
        except TimeoutError:
            raise BenchError(f"an answer has not ended within {timeout_s:.0f} s") from None
        finally:
            self.abort()
        return self.trace

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, well or not."""
        return self._over.done()

    def abort(self) -> None:
        """Close the connection, whatever is still to come."""
        if self._transport is not None:
            self._transport.abort()
        if not self._over.done():
            self._over.cancel()

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == DONE:
            self._end(None)
            return
        event = _decode(payload)
        if event.error is not None:
            raise BenchError(f"error event: {event.error}")
        if event.usage is not None:
            self.trace.num_tokens = event.usage.completion_tokens
        if event.choices and event.choices[0].text:
            chunks = self.trace.chunk_s
            chunks.append(now_s)
            if self._tally is not None:
                self._tally.num_chunks += 1
                self._tally.num_started += len(chunks) == 1

    def _end(self, error: BenchError | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # read here: `finished` may never be awaited after an abort


def encode_request(endpoint: Endpoint, prompt: Sequence[int], output_tokens: int) -> bytes:
    """A whole HTTP request for exactly `output_tokens` greedy tokens."""
    body = msgspec.json.encode(
        {
            "model": endpoint.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\n"
        f"host: {endpoint.host}:{endpoint.port}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def open_streams(endpoint: Endpoint, count: int, tally: Tally | None = None) -> list[Stream]:
    """Open connections; nothing is asked yet.

    Raises:
        BenchError: the server does not accept them in time.
    """
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for _ in range(count):
                made = await loop.create_connection(
                    lambda: Stream(tally), endpoint.host, endpoint.port
                )
                streams.append(made[1])
    except (OSError, TimeoutError) as error:
        for stream in streams:
            stream.abort()
        raise BenchError(f"cannot connect to port {endpoint.port}: {error!r}") from error
    return streams


async def run_burst(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], output_tokens: int, timeout_s: float
) -> list[Trace]:
    """Ask everything at once and wait for all answers.

    Raises:
        BenchError: an answer failed, came late or has another length than asked for.
    """
    requests = [encode_request(endpoint, prompt, output_tokens) for prompt in prompts]
    streams = await open_streams(endpoint, len(requests))
    for stream, request in zip(streams, requests, strict=True):
        stream.send(request)
    try:
        traces = await asyncio.gather(*(stream.finished(timeout_s) for stream in streams))
    finally:
        for stream in streams:
            stream.abort()
    lengths = {trace.num_tokens for trace in traces}
    if lengths != {output_tokens} or not all(trace.chunk_s for trace in traces):
        raise BenchError(f"asked for {output_tokens} tokens, got {sorted(lengths)}")
    return list(traces)
