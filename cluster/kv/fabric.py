"""The gloo plane: a process group of two, built directly and alone.

No global group exists, so pools stay elastic; the two ends meet through a key-value store that is
relayed over their session, so no name is ever looked up and no file or port is left behind. The
only module that knows `torch.distributed`. Groups are never reused after an error: gloo cannot
cancel a posted operation, so a timed-out one poisons its group on both sides.
"""

from __future__ import annotations

import functools
import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from cluster.clock import monotonic_s
from cluster.errors import HandoffError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

SENDER_RANK = 0
RECEIVER_RANK = 1
_TAG = 0


class SessionStore(dist.Store):  # type: ignore[misc]  # torch is untyped in the everyday gate
    """The rendezvous store of one group: own keys go out by `publish`, the peer's come by `put`."""

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        """`publish` may be called from the I/O thread; every wait ends within `timeout_s`."""
        super().__init__()
        self._publish = publish
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def put(self, key: str, value: bytes) -> None:
        """The peer set a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The peer will set nothing more: wake whoever waits."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    # ---- torch's store interface, called from C++ on the I/O thread -----------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a key for both ends."""
        self.put(key, bytes(value))
        self._publish(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Value of a key, waiting for it."""
        self._wait_for([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; torch's timeout only ever shortens ours."""
        self._wait_for(keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        with self._changed:
            return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: the link's deadline holds."""

    def _wait_for(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        deadline_s = monotonic_s() + limit_s
        with self._changed:
            while not all(key in self._values for key in keys):
                if self._failure is not None:
                    raise ConnectionError(self._failure)
                left_s = deadline_s - monotonic_s()
                if left_s <= 0:
                    raise TimeoutError(f"the peer did not join within {limit_s} s")
                self._changed.wait(left_s)


@functools.cache
def _device(host: str) -> Any:  # noqa: ANN401 - torch is untyped in the everyday gate
    """One gloo device per interface, shared by all groups: one listener, one thread for all."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


class _GlooWork:
    """A posted operation; `wait` drops the GIL."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:  # noqa: ANN401
        self._work = work
        self._buffer = buffer  # kept alive while gloo may touch it

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise HandoffError(f"gloo: {_first_line(error)}") from error


class GlooPlane:
    """Plane over a 2-rank `ProcessGroupGloo`; `rank` is SENDER_RANK or RECEIVER_RANK."""

    def __init__(self, store: SessionStore, rank: int, host: str) -> None:
        """`host` is the numeric address of the interface to listen on."""
        self._store = store
        self._rank = rank
        self._host = host
        self._group: Any = None

    def connect(self, timeout_s: float) -> None:
        """Build the group. Its own timeout bounds the rendezvous; operations bring theirs."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            options._devices = [_device(self._host)]
            self._group = dist.ProcessGroupGloo(self._store, self._rank, 2, options)
        except (RuntimeError, OSError) as error:  # OSError: what our own store raises
            raise HandoffError(f"gloo: {_first_line(error)}") from error

    def post_send(self, buffer: torch.Tensor) -> _GlooWork:
        """Post a send to the other rank."""
        return self._post(self._group.send, buffer)

    def post_recv(self, buffer: torch.Tensor) -> _GlooWork:
        """Post a receive; a message longer than `buffer` would end this process."""
        return self._post(self._group.recv, buffer)

    def close(self) -> None:
        """Drop the group: its sockets close and the other end notices."""
        self._group = None

    def _post(self, operation: Any, buffer: torch.Tensor) -> _GlooWork:  # noqa: ANN401
        try:
            return _GlooWork(operation([buffer], 1 - self._rank, _TAG), buffer)
        except RuntimeError as error:
            raise HandoffError(f"gloo: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """The message without the source position that gloo puts in front of it."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*:\d+\]\s*", "", line)
