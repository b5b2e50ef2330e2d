"""Which workers the ingress may open sessions with, right now.

One directory per ingress process. Whoever knows the membership (Serve's replica list through
`replica_choice.py`, or `--local`) replaces a role's list with `update`; subscribers are told the
whole new membership, on the event loop, only when it changed. Knows addresses, not liveness:
that is the sessions' business. Never waits and never opens a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cluster.types import Role, WorkerAddress

Subscriber: TypeAlias = Callable[[tuple[WorkerAddress, ...]], None]


class WorkerDirectory:
    """The membership of both pools, with change notices."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_role: dict[Role, tuple[WorkerAddress, ...]] = {}
        self._subscribers: list[Subscriber] = []

    @property
    def current(self) -> tuple[WorkerAddress, ...]:
        """All members, prefill workers first, each pool in order of worker id."""
        return self._by_role.get(Role.PREFILL, ()) + self._by_role.get(Role.DECODE, ())

    def update(self, role: Role, workers: tuple[WorkerAddress, ...]) -> None:
        """Replace the members of one pool; a worker that is gone from it is draining or dead."""
        members = tuple(sorted(workers, key=lambda address: (address.worker, address.incarnation)))
        if members == self._by_role.get(role, ()):
            return
        self._by_role[role] = members
        for subscriber in tuple(self._subscribers):
            subscriber(self.current)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with the current membership now and with every later one.

        Returns:
            A function that ends the subscription.
        """
        self._subscribers.append(subscriber)
        subscriber(self.current)
        return lambda: self._subscribers.remove(subscriber)
