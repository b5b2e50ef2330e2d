"""One idle Serve stream to every listed worker, so that Serve waits before it removes one.

Each ingress keeps a `hold` call open to each worker of the directory. A worker that is no longer
listed is draining: its hold is let go as soon as this ingress needs it no more, and when all
ingresses have done so Serve ends the replica. Holds are opened in a clean context at start-up,
never inside a request, since Serve ties a call to the request that made it. A hold that breaks
says only that a worker is gone, which its session has reported already.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from cluster.types import Incarnation, Role, WorkerAddress
    from router.directory import WorkerDirectory

log = logging.getLogger(__name__)

HOLD_AGAIN_S = 1.0


class OpenHold(Protocol):
    """Opens the idle stream to the worker with this incarnation."""

    def __call__(self, target: str) -> AsyncIterator[str]:
        """Yield once when the hold stands; end when it is over."""


class HoldKeeper:
    """Keeps holds equal to the directory's list."""

    def __init__(
        self,
        openers: Mapping[Role, OpenHold],
        directory: WorkerDirectory,
        needed: Callable[[Incarnation], bool],
    ) -> None:
        """One opener per pool; nothing is opened before `start`.

        `needed` tells whether a worker that is not listed any more still serves requests of this
        ingress; `review` is called when its answer may have changed.
        """
        self._openers = openers
        self._directory = directory
        self._needed = needed
        self._holds: dict[Incarnation, asyncio.Task[None]] = {}
        self._primers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Follow the directory from now on.

        Serve creates the replica choice of a pool, and with it the source of the directory, on
        the first call: so one call per pool is made that is meant to be refused.
        """
        self._primers = [_spawn(self._prime(role)) for role in self._openers]
        self._directory.subscribe(self._follow)

    def stop(self) -> None:
        """Let go of everything."""
        for task in (*self._primers, *self._holds.values()):
            task.cancel()
        self._holds.clear()

    def review(self) -> None:
        """Let go of workers that are neither listed nor needed."""
        self._follow(self._directory.current)

    def _follow(self, listed: tuple[WorkerAddress, ...]) -> None:
        for address in listed:
            if address.incarnation not in self._holds:
                self._holds[address.incarnation] = _spawn(self._hold(address))
        gone = set(self._holds) - {address.incarnation for address in listed}
        for incarnation in gone:
            if not self._needed(incarnation):
                self._holds.pop(incarnation).cancel()

    async def _hold(self, address: WorkerAddress) -> None:
        """Hold one worker; opened again if it breaks, until `_follow` ends this task."""
        while True:
            try:
                async for _ in self._openers[address.role](target=address.incarnation):
                    log.info("holding %s", address.worker)
            except Exception as error:  # noqa: BLE001  # task root; Serve's have no common type
                log.info("hold of %s ended: %s", address.worker, type(error).__name__)
            await asyncio.sleep(HOLD_AGAIN_S)

    async def _prime(self, role: Role) -> None:
        try:
            async for _ in self._openers[role](target="nobody"):
                pass
        except Exception as error:  # noqa: BLE001  # task root; the refusal is what is expected
            log.debug("first call to the %s pool: %s", role, type(error).__name__)


def _spawn(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task that no request's end can cancel."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())
