"""What the Serve deployments of both roles share; itself free of Ray.

A shell starts a worker inside the replica's event loop, so that the replica counts as ready only
when the worker listens, and passes on its address, its health and its end. `hold` is the idle
stream by which an ingress makes Serve wait for it before it removes a replica. All the work is
the worker's own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cluster.errors import WorkerLostError
from cluster.types import Incarnation, Role, WorkerAddress, WorkerId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.worker import WorkerBase


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

    async def _open(self, worker: WorkerBase) -> None:
        """Start the worker; returns when it listens.

        Raises:
            ModelError: the model cannot be served.
        """
        logging.getLogger().setLevel(logging.INFO)
        self._worker = worker
        self._stopped = asyncio.Event()
        self._address = await worker.start()

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

    async def close(self) -> None:
        """Stop the worker; Serve calls it after the last hold has ended or timed out."""
        self._stopped.set()
        await self._worker.stop()
