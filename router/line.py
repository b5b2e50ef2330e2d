"""The waiting line in front of both pools.

Requests take turns in arrival order; only the one at the head may ask workers for room, so a large
request is never overtaken for ever by small ones. The line is bounded in length and each stay in
time. Whoever frees something calls `notify`, and the head looks again: nothing polls.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cluster.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class WaitingLine:
    """FIFO of requests that have no worker yet."""

    def __init__(self, *, max_waiting: int, timeout_s: float) -> None:
        """At most `max_waiting` requests wait, each at most `timeout_s` seconds."""
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._length = 0

    def __len__(self) -> int:
        """Requests in line, the head included."""
        return self._length

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the head of the line and hold it.

        Raises:
            CapacityError: the line is full, or `timeout_s` passed, the body's waits included.
        """
        if self._length > self._max_waiting:
            raise CapacityError(f"{self._length} requests are waiting already")
        self._length += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                yield
        except TimeoutError:
            raise CapacityError(f"no worker had room within {self._timeout_s:g} s") from None
        finally:
            self._length -= 1

    def notify(self) -> None:
        """Something changed: a worker came or went, room was freed, a snapshot arrived."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next `notify`, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
