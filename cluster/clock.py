"""The clock as a value: what every deadline and every pure module is given.

Owns the only reading of the machine's monotonic clock. All times are float seconds from an
arbitrary zero; wall-clock time is for logs and reports and has its own function. Pure modules
receive `now_s` as an argument and never import this; shells take a `Clock` so that tests can
hand in one they turn themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]  # returns monotonic seconds


def monotonic_s() -> float:
    """Seconds on this machine's monotonic clock; only differences mean anything."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since the Unix epoch, for people to read; never for measuring."""
    return time.time()


class ManualClock:
    """A clock that stands still until it is told to move; for tests and the simulator."""

    def __init__(self, now_s: float = 0.0) -> None:
        """Start at `now_s`."""
        self._now_s = now_s

    def __call__(self) -> float:
        """The current reading."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
