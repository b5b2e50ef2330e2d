"""A worker without an engine behind the real Serve shell, and an ingress that only listens.

Run as a program it starts them on Ray and then answers calls to the ingress: one JSON list
`[method, arguments]` a line on standard input, one JSON value a line on standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from cluster.config import load_config
from cluster.shell import WorkerShell
from cluster.types import Incarnation, Role, WorkerAddress, WorkerId
from router.app import HandleOpener, RayCluster
from router.directory import process_directory
from router.holds import HoldKeeper


class StubWorker:
    """What a shell needs of a worker."""

    def __init__(self, worker: WorkerId, role: Role) -> None:
        self._worker, self._role = worker, role
        self.reason: str | None = None

    async def start(self) -> WorkerAddress:
        await asyncio.sleep(0)
        incarnation = Incarnation(secrets.token_hex(4))
        return WorkerAddress(self._worker, self._role, incarnation, "127.0.0.1:1", os.getpid())

    def healthy(self) -> str | None:
        return self.reason

    async def stop(self, grace_s: float = 0.0) -> None:
        self.reason = "stopped"
        if grace_s and (marker := os.environ.get("STUB_DRAIN_MARKER")):
            await asyncio.to_thread(Path(marker).write_text, f"{self._worker} {grace_s}")


class StubReplica(WorkerShell):
    async def __init__(self, role: str) -> None:  # type: ignore[misc]
        from ray import serve
        from ray._private import worker as process

        rank = serve.get_replica_context().rank.rank
        worker: Any = StubWorker(WorkerId(f"{role}-{rank}"), Role(role))
        await self._open(worker, grace_s=2.0, process=process)

    def fail(self, target: str) -> None:
        worker: Any = self._worker
        worker.reason = "made to fail"

    async def __del__(self) -> None:
        await self.close()


class StubIngress:
    """Follows the directory as a real ingress does; tells the test what it sees."""

    async def __init__(self, pools: dict[str, Any]) -> None:  # type: ignore[misc]
        self._pools = pools
        self._changed = asyncio.Event()
        directory = process_directory()
        directory.subscribe(self._on_change)
        self.holds = HoldKeeper(
            {Role(role): HandleOpener(handle) for role, handle in pools.items()},
            directory,
            lambda _: False,
        )
        self.holds.start()

    def _on_change(self, listed: tuple[WorkerAddress, ...]) -> None:
        asyncio.get_running_loop()  # must be told on the event loop
        self._changed.set()

    async def wait_for(self, workers: dict[str, str | None]) -> list[tuple[str, str, int]]:
        """Wait until exactly these workers are listed, none with the incarnation given."""
        async with asyncio.timeout(30):
            while not self._matches(workers):
                self._changed.clear()
                await self._changed.wait()
        return [(a.worker, a.incarnation, a.pid) for a in process_directory().current]

    def _matches(self, workers: dict[str, str | None]) -> bool:
        listed = {a.worker: a.incarnation for a in process_directory().current}
        return set(listed) == set(workers) and all(listed[w] != workers[w] for w in listed)

    async def hold(self, role: str, target: str) -> str:
        """Open one more hold; returns what it yields first, or the error's name."""
        try:
            async for answer in HandleOpener(self._pools[role])(target=target):
                return answer
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return "ended"

    async def fail(self, role: str, target: str) -> None:
        await self._pools[role].fail.remote(target=target)


class StubCluster(RayCluster):
    """The real composition root with stubs for everything that computes."""

    def _application(self) -> Any:
        from tests.support import stub_pool

        pools = {
            role.value: self._deployment(
                stub_pool.StubReplica,
                role.value,
                replicas,
                request_router_config=self._choice(role),
            ).bind(role.value)
            for role, replicas in ((Role.PREFILL, 2), (Role.DECODE, 1))
        }
        return self._deployment(stub_pool.StubIngress, "ingress", 1).bind(pools)


async def answer_calls() -> None:
    from ray import serve

    ingress = serve.get_app_handle("diptych")
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, arguments = json.loads(line)
        result = await getattr(ingress, method).remote(*arguments)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def main() -> None:
    folder: Any = None
    cluster = StubCluster(load_config(None, ["pools.prefill.replicas=2"]), folder, b"")
    try:
        cluster.start(lambda _phase: None)
        asyncio.run(answer_calls())
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
