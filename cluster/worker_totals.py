"""Counters of workers that survive the workers.

A worker's counters are per process life and start at 0 again after a restart; a Prometheus total
must never go back. Owns that difference: per worker id, the sum over its lives. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.types import Incarnation, Role, WorkerId, WorkerSnapshot

_MAX_PAST_LIVES = 64  # remembered per worker, to know late snapshots of a dead process


@dataclass(frozen=True, slots=True)
class Totals:
    """Monotone counters of one worker, or of one of its lives."""

    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    handoff_bytes_sent: int = 0
    handoff_bytes_received: int = 0
    busy_s: float = 0.0

    @classmethod
    def of(cls, snapshot: WorkerSnapshot) -> Totals:
        """The counters of the life that sent this snapshot."""
        return cls(**{name: getattr(snapshot, name) for name in _NAMES})

    def plus(self, other: Totals) -> Totals:
        """Sum, counter by counter."""
        return Totals(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def at_least(self, other: Totals) -> Totals:
        """Maximum, counter by counter: snapshots may arrive out of order."""
        return Totals(*(max(getattr(self, name), getattr(other, name)) for name in _NAMES))


_NAMES = tuple(item.name for item in fields(Totals))


@dataclass(slots=True)
class _Worker:
    role: Role
    incarnation: Incarnation
    current: Totals
    past: Totals = field(default_factory=Totals)
    past_lives: dict[Incarnation, None] = field(default_factory=dict)  # oldest first


class WorkerTotals:
    """Totals of every worker id ever seen."""

    def __init__(self) -> None:
        """Start at zero."""
        self._workers: dict[WorkerId, _Worker] = {}

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Take a snapshot into account; an old or repeated one changes nothing."""
        now = Totals.of(snapshot)
        worker = self._workers.get(snapshot.worker)
        if worker is None:
            self._workers[snapshot.worker] = _Worker(snapshot.role, snapshot.incarnation, now)
        elif snapshot.incarnation == worker.incarnation:
            worker.current = worker.current.at_least(now)
        elif snapshot.incarnation not in worker.past_lives:
            worker.past = worker.past.plus(worker.current)
            worker.past_lives[worker.incarnation] = None
            if len(worker.past_lives) > _MAX_PAST_LIVES:
                del worker.past_lives[next(iter(worker.past_lives))]
            worker.incarnation = snapshot.incarnation
            worker.current = now

    def by_worker(self) -> list[tuple[Role, WorkerId, Totals]]:
        """Role, id and totals over all lives."""
        return [
            (worker.role, name, worker.past.plus(worker.current))
            for name, worker in self._workers.items()
        ]
