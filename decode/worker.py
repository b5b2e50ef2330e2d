"""The Serve deployment of a decode worker: `decode.service` in a replica, nothing more.

Its id is its rank, so that the successor of a dead replica keeps the id under a new incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.collector import collector_paused
from cluster.shell import WorkerShell
from cluster.types import WorkerId

if TYPE_CHECKING:
    from cluster.config import Config
    from cluster.model.identity import ModelFolder


class DecodeWorker(WorkerShell):
    """One replica, one worker."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an async __init__
        self, config: Config, folder: ModelFolder, secret: bytes
    ) -> None:
        """Load the model and listen; the replica is ready when this returns."""
        from ray import serve
        from ray._private import worker as process

        with collector_paused():
            from decode.service import build

            rank = serve.get_replica_context().rank.rank
            worker = build(config, folder, WorkerId(f"decode-{rank}"), secret)
            await self._open(worker, grace_s=config.shutdown_grace_s, process=process)

    async def __del__(self) -> None:
        """Serve's last call before it ends the process."""
        await self.close()
