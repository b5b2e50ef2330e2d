"""Reads one streamed HTTP response, byte by byte as it comes.

Owns HTTP/1.1 framing (chunked or by length) and the splitting into server-sent events. Promises
the same events however the bytes were cut. Small on purpose: 256 streams must cost the measuring
process far less than what it measures. Pure.
"""

from __future__ import annotations

from cluster.errors import DiptychError


class ResponseError(DiptychError):
    """The bytes are no HTTP response that this client understands."""


class ResponseReader:
    """One response; feed it and take the payloads of its `data:` blocks."""

    __slots__ = ("_body", "_chunked", "_left", "_raw", "headers", "is_complete", "status")

    def __init__(self) -> None:
        """Nothing has arrived."""
        self.status: int | None = None
        self.headers: dict[str, str] = {}  # names in lower case
        self.is_complete = False
        self._raw = b""  # not yet taken apart
        self._body = b""  # the block that is not yet complete
        self._chunked = False
        self._left: int | None = None  # bytes of a body of known length still to come

    @property
    def text(self) -> str:
        """The body of a response that is no stream."""
        return self._body.decode(errors="replace")

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the payloads of the data blocks that are now complete.

        Raises:
            ResponseError: this is no HTTP response.
        """
        self._raw += data
        if self.status is None and not self._read_head():
            return []
        self._body += self._take_chunks() if self._chunked else self._take_plain()
        if self.status != 200:
            return []
        return self._take_events()

    def _read_head(self) -> bool:
        head, mark, rest = self._raw.partition(b"\r\n\r\n")
        if not mark:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1") or not status[:3].isdigit():
            raise ResponseError(f"not an HTTP response: {first[:80]!r}")
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(status[:3])
        self._raw = rest
        self._chunked = self.headers.get("transfer-encoding") == "chunked"
        if not self._chunked:
            self._left = int(self.headers.get("content-length", "0"))
        return True

    def _take_plain(self) -> bytes:
        assert self._left is not None
        part, self._raw = self._raw[: self._left], self._raw[self._left :]
        self._left -= len(part)
        self.is_complete = self._left == 0
        return part

    def _take_chunks(self) -> bytes:
        raw, position = self._raw, 0
        parts = []
        while (line_end := raw.find(b"\r\n", position)) >= 0:
            try:
                size = int(raw[position:line_end], 16)
            except ValueError:
                raise ResponseError(f"not a chunk: {raw[position:line_end][:40]!r}") from None
            start = line_end + 2
            if len(raw) < start + size + 2:
                break
            parts.append(raw[start : start + size])
            position = start + size + 2
            if size == 0:
                self.is_complete = True
                break
        self._raw = raw[position:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_events(self) -> list[bytes]:
        *blocks, self._body = self._body.split(b"\n\n")
        return [block[6:] for block in blocks if block.startswith(b"data: ")]
