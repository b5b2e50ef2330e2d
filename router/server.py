"""One ingress: flow, HTTP application and listener in one event loop.

Built the same way by a Serve replica and by `--local`. Owns the tasks of both; a task that ends
before it is told to makes `check` fail, and with it the replica's health.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

from cluster.assembly import served_facts
from cluster.errors import DiptychError
from cluster.telemetry import Metrics, Slo, Sources
from cluster.tokenizer import Tokenizer
from router.assembly import build_flow
from router.http.listener import HttpListener
from router.http.settings import HttpSettings
from router.ingress import build_app
from router.metrics import MetricsObserver
from router.status import IngressFacts

if TYPE_CHECKING:
    import socket

    from cluster.config import Config
    from cluster.model.identity import ModelFolder
    from cluster.types import WorkerSnapshot
    from router.directory import WorkerDirectory
    from router.sessions import WorkerSessions


class IngressServer:
    """Everything clients of one ingress touch."""

    def __init__(
        self,
        config: Config,
        folder: ModelFolder,
        directory: WorkerDirectory,
        taken: socket.socket,
        *,
        secret: bytes,
        ingress: str,
    ) -> None:
        """Build on a bound socket; nothing runs before `start`.

        Raises:
            ModelError: the model's folder lacks what serving needs.
        """
        facts = served_facts(config, folder)
        self._metrics = Metrics(
            Sources(self._snapshots, self._degraded, lambda: self._flow.num_waiting),
            build={
                "version": version("diptych"),
                "model": facts.served_name,
                "revision": facts.revision,
            },
            slo=Slo(config.admission.slo.ttft_s, config.admission.slo.tpot_s),
        )
        observer = MetricsObserver(self._metrics)
        self._flow = build_flow(
            config,
            facts,
            directory,
            secret=secret,
            ingress=IngressFacts(ingress, os.getpid(), config.mode),
            observer=observer,
            render=self._metrics.render,
        )
        tokenizer = Tokenizer.load(folder.path)
        self._listener = HttpListener(
            build_app(self._flow, _http_settings(config), tokenizer, observer=observer), taken
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Serve from now on, in a clean context: no request's end may cancel this."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(work, context=contextvars.Context(), name=name)
            for name, work in (
                ("flow", self._flow.run()),
                ("http", self._listener.run()),
                ("metrics", self._metrics.run()),
            )
        ]

    @property
    def sessions(self) -> WorkerSessions:
        """The sessions of this ingress with the workers."""
        return self._flow.sessions

    def check(self) -> None:
        """Tell whether this ingress still works.

        Raises:
            DiptychError: a task ended; the ingress must be replaced.
        """
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise DiptychError(f"the ingress' {task.get_name()} task ended: {error!r}")

    async def stop(self, grace_s: float) -> None:
        """Take no new connection, give open streams the grace period, then end everything."""
        flow, http, metrics = self._tasks
        self._listener.stop(grace_s)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({http}, timeout=grace_s + 1.0)
        for task in (http, flow, metrics):
            task.cancel()
        await asyncio.gather(http, flow, metrics, return_exceptions=True)

    def _snapshots(self) -> list[WorkerSnapshot]:
        peers = self._flow.sessions.peers
        return [peer.snapshot for peer in peers if peer.alive and peer.snapshot is not None]

    def _degraded(self) -> tuple[str, ...]:
        return self._flow.ready().reasons


def _http_settings(config: Config) -> HttpSettings:
    return HttpSettings(
        keepalive_s=config.http.keepalive_s,
        early_headers_s=config.http.early_headers_s,
        request_timeout_s=config.request_timeout_s,
        cors_origins=config.http.cors_origins,
        unknown_fields=config.http.unknown_fields,
        debug=config.debug_enabled,
        version=version("diptych"),
    )
