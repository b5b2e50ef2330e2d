"""SIGINT and SIGTERM as one request to stop.

During a start the first signal raises `KeyboardInterrupt` wherever the main thread is; while
serving it only sets the event that the main thread waits for. Every later signal is ignored, so an
impatient second Ctrl-C cannot cut the clean-up short. Installed explicitly, because a shell starts
background processes with SIGINT ignored and Ray installs a SIGTERM handler of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class StopSignals:
    """The two signals of the process that `up` is; main thread only."""

    def __init__(self) -> None:
        """Ignore nothing yet; `install` takes the signals over."""
        self.requested = threading.Event()
        self._interrupts = False

    def install(self) -> None:
        """Take the signals over, again if somebody else did meanwhile."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within this block a first signal raises `KeyboardInterrupt`."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.requested.is_set()
        self.requested.set()
        if is_first and self._interrupts:
            raise KeyboardInterrupt
