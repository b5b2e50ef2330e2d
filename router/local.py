"""`diptych up --local`: the whole cluster in one process, without Ray.

The same workers, flow and HTTP application on one event loop, joined by the same sessions and
links. For breakpoints and small machines: engines share the interpreter, so it says nothing about
speed, and a worker that fails is not replaced.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import uvloop

from cluster.errors import DiptychError
from cluster.types import Role, WorkerAddress, WorkerId
from router.directory import WorkerDirectory
from router.http.listener import bind
from router.server import IngressServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config import Config
    from cluster.model.identity import ModelFolder
    from cluster.worker import WorkerBase

STOP_S = 5.0


class LocalCluster:
    """The counterpart of `router.app.RayCluster`; its loop runs in a thread of its own."""

    def __init__(self, config: Config, folder: ModelFolder, secret: bytes) -> None:
        """Nothing is started yet."""
        self._config = config
        self._folder = folder
        self._secret = secret
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._workers: list[WorkerBase] = []
        self._server: IngressServer | None = None

    def start(self, begin: Callable[[str], None]) -> None:
        """Start everything; returns when clients can connect.

        Raises:
            ModelError: the model cannot be served.
        """
        self._thread.start()
        begin("start workers and load the model")
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def failure(self) -> str | None:
        """Why the cluster cannot go on, if so."""
        for worker in self._workers:
            reason = worker.healthy()
            if reason is not None:
                return reason
        try:
            if self._server is not None:
                self._server.check()
        except DiptychError as error:
            return error.message
        return None

    def stop(self) -> None:
        """Stop everything and the loop."""
        if not self._thread.is_alive():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        try:
            stopping.result(STOP_S)
        except TimeoutError:
            stopping.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    async def _start(self) -> None:
        import decode.service
        import prefill.service

        config, folder, secret = self._config, self._folder, self._secret
        self._workers = [
            prefill.service.build(config, folder, WorkerId(f"prefill-{rank}"), secret)
            for rank in range(config.prefill_replicas)
        ] + [
            decode.service.build(config, folder, WorkerId(f"decode-{rank}"), secret)
            for rank in range(config.decode_replicas)
        ]
        addresses = [await worker.start() for worker in self._workers]
        directory = _directory(addresses)
        self._server = IngressServer(
            config,
            folder,
            directory,
            bind(config.http.host, config.http.port),
            secret=secret,
            ingress="ingress-0",
        )
        self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(self._config.shutdown_grace_s)
        for worker in self._workers:
            await worker.stop()


def _directory(addresses: list[WorkerAddress]) -> WorkerDirectory:
    directory = WorkerDirectory()
    for role in (Role.PREFILL, Role.DECODE):
        directory.update(role, tuple(a for a in addresses if a.role is role))
    return directory
