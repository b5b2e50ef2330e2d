"""The few ASGI messages this product uses, with the ways a client can go away.

Owns reading a bounded body, writing a whole response, and noticing a disconnect; whatever the
server reports it as, it becomes `ClientGoneError`. Plain ASGI: no framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from cluster.errors import RequestError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[str, str], ...]

_DISCARD_FACTOR = 4  # an over-long body is read up to this many limits, so that the client hears us


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer."""


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole request body.

    Raises:
        RequestError: it is longer than `max_bytes`, or took longer than `timeout_s`.
        ClientGoneError: the client went away meanwhile.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(receive, max_bytes)
    except TimeoutError:
        message = f"the request body took longer than {timeout_s:g} s"
        raise RequestError(message, code="request_timeout") from None


async def _read_body(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    more = True
    while more and num_bytes <= max_bytes * _DISCARD_FACTOR:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            parts.append(part)
        more = message.get("more_body", False)
    if num_bytes > max_bytes:
        raise RequestError(
            f"the request body is longer than {max_bytes} bytes", code="request_too_large"
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def watch_for_disconnect(receive: Receive) -> None:
    """Return never; raise ClientGoneError as soon as the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


async def start_response(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    """Send status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await _send(send, {"type": "http.response.start", "status": status, "headers": raw})


async def send_part(send: Send, body: bytes) -> None:
    """Send a part of the body."""
    await _send(send, {"type": "http.response.body", "body": body, "more_body": True})


async def send_last(send: Send, body: bytes) -> None:
    """Send the end of the body."""
    await _send(send, {"type": "http.response.body", "body": body, "more_body": False})


async def respond(
    send: Send, status: int, body: bytes, headers: Headers = (), *, content_type: str
) -> None:
    """Send a whole response."""
    basic = (("content-type", content_type), ("content-length", str(len(body))))
    await start_response(send, status, (*basic, *headers))
    await send_last(send, body)


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError as error:  # what ASGI servers raise on a closed connection
        raise ClientGoneError from error
