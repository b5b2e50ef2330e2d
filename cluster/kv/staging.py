"""Staging: the buffers a link sends from and receives into, and the gate in front of KV rows.

The ring is made once and touched once, because fresh pages cost more than the wire, and it lives
and dies with its link: a plane that is stuck may still write into a slot, never into a row.
`RowAccess` answers when no copy can touch a transfer's rows any more, without anyone waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from cluster.kv.frames import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

NUM_SLOTS = 3


class Slot:
    """Room for one frame of at most `num_bytes` bytes."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate and touch every page on the calling thread."""
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)  # [num_bytes]
        self.bytes: npt.NDArray[np.uint8] = self.tensor.numpy()  # the same memory
        self.bytes.fill(0)

    def rows(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """The payload as rows, a view `[num_blocks, block_bytes]`."""
        end = HEADER_BYTES + num_blocks * block_bytes
        return self.tensor[HEADER_BYTES:end].view(num_blocks, block_bytes)


class StagingRing:
    """A link's slots; taken and given back by its I/O thread alone."""

    def __init__(self, slot_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        """Allocate all slots."""
        self._free = deque(Slot(slot_bytes) for _ in range(num_slots))

    @property
    def has_free(self) -> bool:
        """Whether `take` would find a slot."""
        return bool(self._free)

    def take(self) -> Slot:
        """The slot that has been free for longest."""
        return self._free.popleft()

    def give(self, slot: Slot) -> None:
        """Nothing reads or writes `slot` any more."""
        self._free.append(slot)


class RowAccess:
    """Lets an I/O thread copy a transfer's rows until the transfer's owner closes it."""

    def __init__(self) -> None:
        """Open, and nobody inside."""
        self._lock = threading.Lock()
        self._open = True
        self._busy = False
        self._on_quiet: Callable[[], None] | None = None

    def enter(self) -> bool:
        """Ask to copy; with True the rows stay until `leave`, with False keep off."""
        with self._lock:
            if not self._open:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """The copy is done."""
        with self._lock:
            self._busy = False
            on_quiet, self._on_quiet = self._on_quiet, None
        if on_quiet is not None:
            on_quiet()

    def close(self, on_quiet: Callable[[], None]) -> None:
        """Let nobody in any more; `on_quiet` runs once the rows are untouched for good.

        It runs here and now when no copy is under way, else on the copying thread. Only the first
        call counts.
        """
        with self._lock:
            if not self._open:
                return
            self._open = False
            if self._busy:
                self._on_quiet = on_quiet
                return
        on_quiet()
