"""What a data plane is to a link: bytes between two ends, in order, with deadlines.

A plane only constructs, posts, waits and closes; states, epochs, frames and rows are the link's.
All methods are called from the link's one I/O thread and may block up to their deadline. The
receiver of a message must have posted exactly its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Posted(Protocol):
    """A send or receive under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when it is done.

        Raises:
            HandoffError: The peer is gone or `timeout_s` passed; the plane is of no more use.
        """


class Plane(Protocol):
    """One end of a two-ended data plane."""

    def connect(self, timeout_s: float) -> None:
        """Meet the other end.

        Raises:
            HandoffError: It did not come, or the plane cannot be built.
        """

    def post_send(self, buffer: torch.Tensor) -> Posted:
        """Start sending `buffer`, uint8 `[num_bytes]`, which must not change until done."""

    def post_recv(self, buffer: torch.Tensor) -> Posted:
        """Start receiving exactly `buffer`, uint8 `[num_bytes]`."""

    def close(self) -> None:
        """Let go of everything; never blocks for long, may be called twice."""
