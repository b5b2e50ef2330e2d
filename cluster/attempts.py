"""Which attempts a worker has seen: the memory behind idempotence and fencing.

A submit may arrive twice, after its own cancel, or after a newer attempt at the same request.
`AttemptBook` answers what each arrival is, in bounded memory: finished and cancelled attempts are
remembered as tombstones for `ttl_s` seconds, oldest dropped first beyond `max_entries`. Pure: the
clock is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from cluster.types import AttemptKey, RequestId


class Verdict(Enum):
    """What an arriving attempt is."""

    NEW = "new"
    DUPLICATE = "duplicate"  # already held: answer as the first time
    STALE = "stale"  # a higher attempt was seen
    OVER = "over"  # cancelled or finished already: refuse


class AttemptBook:
    """Highest attempt seen per request, and tombstones of attempts that are over."""

    def __init__(self, *, ttl_s: float = 60.0, max_entries: int = 20_000) -> None:
        """`max_entries` bounds each of the two tables."""
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._highest: OrderedDict[RequestId, tuple[int, float]] = OrderedDict()
        self._over: OrderedDict[AttemptKey, float] = OrderedDict()
        self._held: set[AttemptKey] = set()

    @property
    def num_entries(self) -> int:
        """Remembered requests and tombstones, for the tests of their bound."""
        return len(self._highest) + len(self._over)

    def admit(self, key: AttemptKey, now_s: float) -> Verdict:
        """Judge an arriving attempt; NEW ones are held until `close`."""
        self._expire(now_s)
        if key in self._over:
            return Verdict.OVER
        if key in self._held:
            return Verdict.DUPLICATE
        highest, _ = self._highest.get(key.request, (0, now_s))
        if key.attempt < highest:
            return Verdict.STALE
        self._highest[key.request] = (key.attempt, now_s)
        self._highest.move_to_end(key.request)
        self._held.add(key)
        return Verdict.NEW

    def close(self, key: AttemptKey, now_s: float) -> None:
        """The attempt is over, known or not; later arrivals of it are refused."""
        self._expire(now_s)
        self._held.discard(key)
        self._over[key] = now_s
        self._over.move_to_end(key)
        while len(self._over) > self._max_entries:
            self._over.popitem(last=False)

    def _expire(self, now_s: float) -> None:
        horizon_s = now_s - self._ttl_s
        while self._over and next(iter(self._over.values())) < horizon_s:
            self._over.popitem(last=False)
        for _ in range(len(self._highest)):
            request, (attempt, seen_s) = next(iter(self._highest.items()))
            if seen_s >= horizon_s and len(self._highest) <= self._max_entries:
                break
            del self._highest[request]
            if AttemptKey(request, attempt) in self._held:  # still needed: goes to the back
                self._highest[request] = (attempt, now_s)
