"""Workers in this process, asked out of order: cancels, sick peers and impossible jobs."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import SessionClosedError
from cluster.kv.pool import KvPool
from cluster.model.runner import LoadedEngine
from cluster.model.step import StepResult
from cluster.types import Incarnation, ModelFacts, Role, WorkerAddress, WorkerId
from cluster.wire.messages import (
    Accepted,
    Cancel,
    Refused,
    Reserve,
    Reserved,
    SubmitLocal,
    SubmitPrefill,
    Tokens,
)
from cluster.wire.session import SessionOptions
from cluster.worker import WorkerSettings
from decode.service import DecodeService
from prefill.service import PrefillService
from tests.support.handoff_sides import BLOCK_SIZE, LAYOUT, make_job

FACTS = ModelFacts("m", "f" * 64, "r", 4096, 500, BLOCK_SIZE, ())
NUM_BLOCKS = 4


class GatedRunner:
    """Draws token 0 for every slice that wants one, as soon as `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: asyncio.Queue[list[str]] = asyncio.Queue()  # requests of each step
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        pass

    def run(self, batch: Any) -> StepResult:
        names = [piece.key.request for piece in batch.slices]
        self._loop.call_soon_threadsafe(self.seen.put_nowait, names)
        assert self.gate.wait(20)
        tokens = tuple(None if piece.sample is None else 0 for piece in batch.slices)
        return StepResult(tokens, 0.001)


class Ingress:
    """The worker's end of an ingress session, as a worker uses it."""

    def __init__(self) -> None:
        self.peer = SimpleNamespace(role=Role.INGRESS, peer=WorkerId("ingress-0"), layout={})
        self.closed = asyncio.Event()
        self.is_full = False
        self.sent: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, body: Any, *, reply_to: int | None = None) -> None:
        if self.is_full:
            raise SessionClosedError("peer reads too slowly")
        self.sent.put_nowait(body)

    async def next(self, *kinds: type) -> Any:
        async with asyncio.timeout(20):
            while not isinstance(body := await self.sent.get(), kinds):
                pass
        return body


@asynccontextmanager
async def serving(service: Any, role: Role):
    runner = GatedRunner()
    settings = WorkerSettings(
        worker=WorkerId(f"{role.value}-0"),
        role=role,
        facts=FACTS,
        kv_blocks=NUM_BLOCKS,
        chunk_tokens=512,
        max_running=8,
        batch_max_wait_s=0.0,
        prefix_cache=False,
        frame_bytes=1 << 20,
        checksum=False,
        host="127.0.0.1",
        session=SessionOptions(b"secret"),
    )
    pool = KvPool(LAYOUT, NUM_BLOCKS)
    worker = service(settings, lambda: LoadedEngine(runner, pool, LAYOUT, FACTS, {}))
    await worker.start()
    ingress = Ingress()
    worker.opened(ingress)
    try:
        yield worker, runner, ingress
    finally:
        runner.gate.set()
        await worker.stop()


@asynccontextmanager
async def silent_decode_worker():
    """An address that takes connections and never says a word."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    control = f"{host}:{port}"
    async with server:
        yield WorkerAddress(WorkerId("decode-0"), Role.DECODE, Incarnation("life"), control, 1)
    for writer in writers:
        writer.close()


async def test_blocks_of_a_prompt_cancelled_in_its_first_step_go_to_the_next(monkeypatch):
    async with (
        silent_decode_worker() as decode,
        serving(PrefillService, Role.PREFILL) as (worker, runner, ingress),
    ):
        first, second = make_job("first", 40), make_job("second", 40)  # 3 of 4 blocks each
        worker.received(ingress, SubmitPrefill(first, decode), 1)
        assert await asyncio.wait_for(runner.seen.get(), 20) == ["first"]
        refused = threading.Event()
        acquire = worker.ledger.acquire

        def noting(*args: Any, **kwargs: Any) -> Any:
            acquired = acquire(*args, **kwargs)
            if acquired is None:
                refused.set()
            return acquired

        monkeypatch.setattr(worker.ledger, "acquire", noting)
        worker.received(ingress, SubmitPrefill(second, decode), 2)
        worker.received(ingress, Cancel(first.key), None)
        for _ in range(5):  # the handoff of the first lets go
            await asyncio.sleep(0)
        runner.gate.set()
        # Keep the event loop busy until the engine has looked for room and found none.
        assert refused.wait(20)
        assert await asyncio.wait_for(runner.seen.get(), 20) == ["second"]
        assert (await ingress.next(Tokens)).deltas[0].key == second.key


async def test_a_session_that_overflows_costs_the_worker_nothing():
    async with serving(PrefillService, Role.PREFILL) as (worker, runner, ingress):
        worker.received(ingress, SubmitPrefill(make_job("slow", 8, max_tokens=1), None), 1)
        await asyncio.wait_for(runner.seen.get(), 20)
        ingress.is_full = True
        other = Ingress()
        worker.opened(other)
        runner.gate.set()
        worker.received(other, SubmitPrefill(make_job("other", 8, max_tokens=1), None), 1)
        assert (await other.next(Tokens)).deltas[0].key.request == "other"
        assert worker.healthy() is None


@pytest.mark.parametrize(
    "job",
    [
        make_job("empty", 0),
        make_job("unknown token", 8, first=495),
        make_job("negative token", 8, first=-1),
        make_job("beyond the context", 8, max_tokens=4089),
    ],
    ids=lambda job: job.key.request,
)
async def test_a_job_no_step_could_run_is_refused(job):
    async with serving(PrefillService, Role.PREFILL) as (worker, _, ingress):
        worker.received(ingress, SubmitPrefill(job, None), 1)
        refused = await ingress.next(Accepted, Refused)
        assert isinstance(refused, Refused)
        assert refused.retry_after_s is None
        assert worker.healthy() is None
    async with serving(DecodeService, Role.DECODE) as (worker, _, ingress):
        for number, message in enumerate((Reserve(job), SubmitLocal(job))):
            worker.received(ingress, message, number)
            refused = await ingress.next(Accepted, Reserved, Refused)
            assert isinstance(refused, Refused)
            assert refused.retry_after_s is None
        assert worker.healthy() is None


async def test_a_job_whose_kv_arrives_is_not_prefilled_here_too():
    job = make_job("once", 8)
    async with serving(DecodeService, Role.DECODE) as (worker, _, ingress):
        worker.received(ingress, Reserve(job), 1)
        assert isinstance(await ingress.next(Reserved, Refused), Reserved)
        worker.receiver.take(job.key)  # as an accepted offer does
        worker.received(ingress, SubmitLocal(job), 2)
        assert isinstance(await ingress.next(Accepted, Refused), Refused)
