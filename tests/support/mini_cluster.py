"""Real worker processes behind one Flow in the test's own process: no Ray, no HTTP, real gloo."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from cluster.assembly import served_facts
from cluster.clock import monotonic_s
from cluster.config import load_config
from cluster.model.resolve import resolve_model
from cluster.types import Role, SamplingParams, WorkerAddress
from router.assembly import build_flow
from router.directory import WorkerDirectory
from router.flow import Flow, FlowObserver
from router.generation import ClientRequest
from router.status import IngressFacts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from router.records import RequestRecord

SECRET = "test-secret"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave."""

    tokens: list[int]
    finish: str | None
    record: RequestRecord


class WorkerProcess:
    """One worker process of the test's own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.address: WorkerAddress | None = None

    async def ready(self) -> WorkerAddress:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        if not line:
            raise RuntimeError(f"{self.name} ended before it was ready")
        fields: dict[str, Any] = json.loads(line)
        fields["role"] = Role(fields["role"])
        self.address = WorkerAddress(**fields)
        return self.address

    async def stop(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 10)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


class MiniCluster:
    """Workers, their directory and the flow in front of them."""

    def __init__(self, flow: Flow, directory: WorkerDirectory, start_worker: Any) -> None:
        self.flow = flow
        self.directory = directory
        self.workers: dict[str, WorkerProcess] = {}
        self._start_worker = start_worker

    async def start_workers(self, names: Sequence[str]) -> None:
        """Start (or restart) workers and list them in the directory."""
        started = [(name, await self._start_worker(name)) for name in names]
        for name, worker in started:
            await worker.ready()
            self.workers[name] = worker
        self._list()

    def _list(self) -> None:
        addresses = [w.address for w in self.workers.values() if w.address is not None]
        for role in (Role.PREFILL, Role.DECODE):
            listed = sorted((a for a in addresses if a.role is role), key=lambda a: a.worker)
            self.directory.update(role, tuple(listed))

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, mode: Any = "auto", **sampling: Any
    ) -> Answer:
        """Run one request to its end."""
        request = make_request(prompt, max_tokens, mode=mode, **sampling)
        generation = self.flow.start(request)
        tokens: list[int] = []
        finish: str | None = None
        try:
            async for delta in generation.deltas():
                tokens.extend(delta.token_ids)
                finish = delta.finish.value if delta.finish else finish
        finally:
            await generation.aclose()
        return Answer(tokens, finish, generation.record)

    async def until_quiet(self, timeout_s: float = 20.0) -> None:
        """Wait until every live worker reports that it holds nothing for anybody."""
        async with asyncio.timeout(timeout_s):
            while not all(_is_quiet(worker) for worker in self.status_workers()):
                await self.flow.line.changed(0.2)

    def status_workers(self) -> list[dict[str, Any]]:
        return [w for w in self.flow.status()["workers"] if w["state"] == "ready"]

    async def until_sent(self, num_bytes: int, timeout_s: float = 20.0) -> None:
        """Wait until the workers report just so many bytes of KV sent; more is a failure."""
        async with asyncio.timeout(timeout_s):
            while (sent := self._sent_bytes()) != num_bytes:
                assert sent < num_bytes
                await self.flow.line.changed(0.2)

    def _sent_bytes(self) -> int:
        return sum(w["handoff_bytes_sent"] for w in self.status_workers())


def _is_quiet(worker: dict[str, Any]) -> bool:
    blocks = worker["blocks"]
    idle = worker["running"] == worker["waiting"] == worker["tickets"] == 0
    free = blocks["free"] + blocks["cached"] == blocks["total"]
    return bool(idle and free and worker["open_transfers"] == 0)


def make_request(
    prompt: Sequence[int], max_tokens: int, *, mode: Any = "auto", **sampling: Any
) -> ClientRequest:
    """A completion request for token ids."""
    return ClientRequest(
        id=secrets.token_hex(8),
        client_request_id="test",
        kind="completion",
        model="m",
        prompts=(tuple(prompt),),
        n=1,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed_given="seed" in sampling,
        stream=True,
        timeout_s=120.0,
        mode=mode,
        received_s=monotonic_s(),
        tokenize_s=0.0,
    )


@asynccontextmanager
async def mini_cluster(
    model: str | Path,
    tmp_path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    cache: Path | None = None,
    **settings: Any,
) -> AsyncIterator[MiniCluster]:
    """Start workers over `model` with config `settings` (nested dicts as in YAML)."""
    data: dict[str, Any] = {"model": {"id": str(model), "dtype": "float32"}, **settings}
    if prefill == 0:
        data["mode"] = "aggregated"
    config_path = tmp_path / f"config-{secrets.token_hex(4)}.yaml"
    config_path.write_text(yaml.safe_dump(data))
    config = load_config(config_path)
    cache_dir = cache or tmp_path / "cache"
    folder = resolve_model(str(model), None, cache_dir)
    env = os.environ | {"DIPTYCH_CACHE": str(cache_dir), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling transformers anew costs seconds a start

    async def start_worker(name: str) -> WorkerProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.worker_main",
            str(config_path),
            str(model),
            name,
            SECRET,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
        )
        return WorkerProcess(name, process)

    directory = WorkerDirectory()
    flow = build_flow(
        config,
        served_facts(config, folder),
        directory,
        secret=SECRET.encode(),
        ingress=IngressFacts("ingress-test", os.getpid(), config.mode),
        observer=FlowObserver(),
        render=str,
    )
    cluster = MiniCluster(flow, directory, start_worker)
    runner = asyncio.create_task(flow.run())
    try:
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        await cluster.start_workers(names)
        async with asyncio.timeout(30):
            while flow.ready().status == "unready":
                await flow.line.changed(0.2)
        yield cluster
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        for worker in cluster.workers.values():
            await worker.stop()
