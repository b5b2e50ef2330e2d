"""Which workers exist, as the platform says: membership, not liveness.

Ray Serve's replica list (or `--local`) writes it, sessions read it. A worker that is listed may be
dead already: that is for the sessions to find out. Everything here runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.types import Role, WorkerAddress, WorkerId

Subscriber = Callable[[tuple[WorkerAddress, ...]], None]


class WorkerDirectory:
    """The current list and whoever wants to hear of changes."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_role: dict[Role, tuple[WorkerAddress, ...]] = {}
        self._subscribers: list[Subscriber] = []

    @property
    def current(self) -> tuple[WorkerAddress, ...]:
        """All listed workers, ordered by id."""
        everyone = [address for listed in self._by_role.values() for address in listed]
        return tuple(sorted(everyone, key=lambda address: address.worker))

    def find(self, worker: WorkerId) -> WorkerAddress | None:
        """The listed address of a worker."""
        return next((a for a in self.current if a.worker == worker), None)

    def update(self, role: Role, workers: tuple[WorkerAddress, ...]) -> None:
        """Replace the list of one pool; subscribers hear of it only if it changed."""
        if self._by_role.get(role, ()) == workers:
            return
        self._by_role[role] = workers
        for subscriber in tuple(self._subscribers):
            subscriber(self.current)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hear of every change from now on, and of the current list at once."""
        self._subscribers.append(subscriber)
        subscriber(self.current)


_PROCESS_DIRECTORY = WorkerDirectory()


def process_directory() -> WorkerDirectory:
    """The one directory of this process, for writers that somebody else constructs."""
    return _PROCESS_DIRECTORY
