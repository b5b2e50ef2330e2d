"""What the Serve deployments of both roles share; itself free of Ray.

A shell starts a worker inside the replica's event loop, so that the replica counts as ready only
when the worker listens, and passes on its address, its health and its end. `hold` is the idle
stream by which an ingress makes Serve wait for it before it removes a replica. All the work is
the worker's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from cluster.errors import WorkerLostError
from cluster.types import Incarnation, Role, WorkerAddress, WorkerId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import ModuleType

    from cluster.worker import WorkerBase

log = logging.getLogger(__name__)

CLOSE_S = 1.0  # for sessions, links and the engine, after the drain
_LAST_STEP = "raise_sys_exit_with_custom_error_message"


def to_metadata(address: WorkerAddress) -> dict[str, str | int]:
    """The worker's address as the static metadata Serve spreads about a replica."""
    return {
        "worker": address.worker,
        "role": address.role.value,
        "incarnation": address.incarnation,
        "control": address.control,
        "pid": address.pid,
    }


def from_metadata(metadata: dict[str, Any]) -> WorkerAddress | None:
    """The address in a replica's metadata; None when it is no worker of ours."""
    try:
        return WorkerAddress(
            worker=WorkerId(metadata["worker"]),
            role=Role(metadata["role"]),
            incarnation=Incarnation(metadata["incarnation"]),
            control=metadata["control"],
            pid=int(metadata["pid"]),
        )
    except (KeyError, ValueError):
        return None


class WorkerShell:
    """Base of the two deployment classes; the method names are Serve's."""

    async def _open(self, worker: WorkerBase, *, grace_s: float, process: ModuleType) -> None:
        """Start the worker; returns when it listens.

        Args:
            worker: what this replica runs.
            grace_s: how long a drain may take once the process is told to end.
            process: Ray's module of the worker process, see `_drain_at_sigterm`.

        Raises:
            ModelError: the model cannot be served.
        """
        logging.getLogger().setLevel(logging.INFO)
        self._worker = worker
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._address = await worker.start()
        self._drain_at_sigterm(process)

    def record_replica_metadata(self) -> dict[str, str | int]:
        """Where to open sessions; asked once, after the start."""
        return to_metadata(self._address)

    async def check_health(self) -> None:
        """Fail, and thereby have the replica replaced, once the worker cannot go on.

        Raises:
            WorkerLostError: with the engine's reason.
        """
        reason = self._worker.healthy()
        if reason is not None:
            raise WorkerLostError(reason)

    async def hold(self, target: str) -> AsyncIterator[str]:
        """Stay open until the caller lets go; `target` is the incarnation it means."""
        if target != self._address.incarnation:
            raise WorkerLostError(f"{self._address.worker} is not the incarnation {target}")
        yield self._address.incarnation
        await self._stopped.wait()

    def _drain_at_sigterm(self, process: ModuleType) -> None:
        """Let SIGTERM drain the worker before the process ends.

        Only the main thread may install a signal handler, and Ray keeps that thread in C++; but
        Ray's own handler looks its last step up by name, so the drain is put in front of it.
        """
        end_process = getattr(process, _LAST_STEP, None)
        if end_process is None:
            log.warning("this version of Ray ends a worker without a drain at SIGTERM")
            return

        def drain_first(*args: object, **kwargs: object) -> None:
            try:
                self._terminate()
            finally:
                end_process(*args, **kwargs)

        setattr(process, _LAST_STEP, drain_first)

    def _terminate(self) -> None:
        """Drain within the grace period; runs on the main thread, beside the event loop."""
        log.info("%s: SIGTERM, draining", self._address.worker)
        drained = asyncio.run_coroutine_threadsafe(self._worker.stop(self._grace_s), self._loop)
        with contextlib.suppress(TimeoutError):
            drained.result(self._grace_s + CLOSE_S)

    async def close(self) -> None:
        """Stop the worker; Serve calls it after the last hold has ended or timed out."""
        self._stopped.set()
        await self._worker.stop()
