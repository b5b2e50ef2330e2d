"""The exactness comparison can fail: one wrong block, position or chunk changes the output.

Both workers live in this process, so that the rows a transfer writes can be spoilt on their way
into the decode worker's pool, behind every check of the link.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import decode.service
import prefill.service
from cluster.assembly import served_facts
from cluster.config import Config
from cluster.kv.pool import KvPool
from cluster.model.resolve import resolve_model
from cluster.types import Role, WorkerId
from router.assembly import build_flow
from router.directory import WorkerDirectory
from router.flow import Flow, FlowObserver
from router.status import IngressFacts
from tests.support.mini_cluster import MiniCluster
from tests.support.tiny_models import build_tiny, oracle_generate, random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

PROMPT = random_prompt(160, seed=1)  # 10 blocks, 5 chunks
NEW_TOKENS = 32
POOL = {"kv_blocks": 64, "chunk_tokens": 32}
CONFIG = Config.model_validate(
    {"model": {"dtype": "float32"}, "pools": {"prefill": POOL, "decode": POOL}}
)


@asynccontextmanager
async def one_process(folder_path: Path, tmp_path: Path) -> AsyncIterator[tuple[Flow, KvPool]]:
    """One prefill and one decode worker behind a flow; yields the decode worker's pool too."""
    folder = resolve_model(str(folder_path), None, tmp_path / "cache")
    workers = [
        prefill.service.build(CONFIG, folder, WorkerId("prefill-0"), b"secret"),
        decode.service.build(CONFIG, folder, WorkerId("decode-0"), b"secret"),
    ]
    directory = WorkerDirectory()
    flow = build_flow(
        CONFIG,
        served_facts(CONFIG, folder),
        directory,
        secret=b"secret",
        ingress=IngressFacts("ingress-test", os.getpid(), CONFIG.mode),
        observer=FlowObserver(),
        render=str,
    )
    running = asyncio.create_task(flow.run())
    try:
        for role, worker in zip((Role.PREFILL, Role.DECODE), workers, strict=True):
            directory.update(role, (await worker.start(),))
        async with asyncio.timeout(30):
            while flow.ready().status == "unready":
                await flow.line.changed(0.2)
        yield flow, workers[1].receiver._pool
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for worker in workers:
            await worker.stop()


def flip_one_block(pool: KvPool, ids: list[int], call: int) -> None:
    """Negate all values of one block of the first frame."""
    if call == 0:
        for layer in range(len(pool.layout.layers)):
            pool.k(layer)[ids[0]] *= -1


def shift_one_position(pool: KvPool, ids: list[int], call: int) -> None:
    """Write one block's tokens a position too late: the first stands twice, the last is lost.

    A rotation would not do: attention does not see in which order past positions are stored.
    """
    if call == 0:
        for layer in range(len(pool.layout.layers)):
            for view in (pool.k(layer), pool.v(layer)):
                view[ids[0], 1:] = view[ids[0], :-1].clone()


def drop_one_chunk(pool: KvPool, ids: list[int], call: int) -> None:
    """Lose all rows of the second frame."""
    if call == 1:
        pool.rows[list(ids)] = 0


def leave_alone(pool: KvPool, ids: list[int], call: int) -> None:
    """The control: the same wrapper without a fault."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("spoil", "equal"),
    [
        (leave_alone, True),
        (flip_one_block, False),
        (shift_one_position, False),
        (drop_one_chunk, False),
    ],
)
async def test_a_spoilt_transfer_changes_the_output(
    spoil: Callable[[KvPool, list[int], int], None],
    equal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = build_tiny("llama", tmp_path / "llama")
    expected, _ = oracle_generate(folder, PROMPT, NEW_TOKENS)
    scatter = KvPool.scatter
    calls = 0
    async with one_process(folder, tmp_path) as (flow, target):

        def spoiling_scatter(self, ids, src):
            nonlocal calls
            scatter(self, ids, src)
            if self is target:
                spoil(self, list(ids), calls)
                calls += 1

        monkeypatch.setattr(KvPool, "scatter", spoiling_scatter)
        answer = await MiniCluster(flow, WorkerDirectory(), None).generate(PROMPT, NEW_TOKENS)
    assert calls >= 2, "the prompt must arrive in several frames for a chunk to be lost"
    assert answer.tokens[0] == expected[0]  # computed by prefill, before any transfer
    assert (answer.tokens == expected) is equal
