"""uvicorn's HTTP protocol with bounds on a request's head, and errors in this API's shape.

uvicorn limits neither the size of headers nor the time a client takes to send them, so idle or
trickling connections would pile up for ever. Here a head of more than `max_head_bytes`, or one
that is not complete `head_timeout_s` after the connection opened or its first byte came, ends
the connection with an error. Bodies and responses are bounded elsewhere, by the application.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.errors import ErrorView

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport

_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection."""

    max_head_bytes = 64 * 1024
    head_timeout_s = 20.0

    _head_bytes = 0  # of the head being read, without the chunk it began in
    _is_in_head = True  # a new connection owes us a head
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; give up on a head that does not end."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if self.transport.is_closing():
            self._stop_timer()
        elif was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._end(431, "headers_too_large", "the request's headers are too large")

    def on_message_begin(self) -> None:
        """A head starts, the first of the connection or a later one."""
        super().on_message_begin()
        if not self._is_in_head:
            self._is_in_head = True
            self._head_bytes = 0
            self._start_timer()

    def on_headers_complete(self) -> None:
        """The head is complete: from here on the application sets the bounds."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, as the parser found."""
        self._end(400, "invalid_http", msg)

    def _start_timer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._end(408, "request_timeout", "the request's headers did not arrive in time")

    def _end(self, status: int, code: str, message: str) -> None:
        """Answer and close, unless an earlier response on this connection is still being sent."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = ErrorView(status, message, "invalid_request_error", code).body()
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
