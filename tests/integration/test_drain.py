"""A worker that is no longer listed takes no new work and finishes what it has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.types import Role
from tests.support.mini_cluster import make_request, mini_cluster
from tests.support.tiny_models import build_tiny, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = random_prompt(40, seed=2)
NEW_TOKENS = 200
POOL = {"kv_blocks": 128, "chunk_tokens": 32}
SETTINGS = {"pools": {"prefill": POOL, "decode": POOL}}


async def test_a_delisted_worker_finishes_its_streams_and_is_let_go(tmp_path: Path):
    folder = build_tiny("llama", tmp_path / "llama")
    async with mini_cluster(folder, tmp_path, decode=2, **SETTINGS) as cluster:
        flow, left = cluster.flow, asyncio.Event()
        expected = await cluster.generate(PROMPT, NEW_TOKENS)
        flow.sessions.on_left(left.set)
        running = flow.start(make_request(PROMPT, NEW_TOKENS))
        leaving = (await running.first()).decode
        listed = tuple(a for a in cluster.directory.current if a.role is Role.DECODE)
        cluster.directory.update(Role.DECODE, tuple(a for a in listed if a.worker != leaving))
        await asyncio.sleep(0)  # let the sessions follow the directory

        others = await asyncio.gather(*(cluster.generate(PROMPT, 8) for _ in range(4)))
        assert {answer.record.attempts[0].decode for answer in others} == (
            {a.worker for a in listed} - {leaving}
        )
        tokens = [token async for delta in running.deltas() for token in delta.token_ids]
        assert tokens == expected.tokens
        await running.aclose()
        await asyncio.wait_for(left.wait(), 10)
        assert leaving not in {peer.address.worker for peer in flow.sessions.peers}


async def test_a_dead_worker_is_listed_until_it_is_replaced(tmp_path: Path):
    folder = build_tiny("llama", tmp_path / "llama")
    async with mini_cluster(folder, tmp_path, engine="timed") as cluster:

        def states() -> dict[str, str]:
            return {w["id"]: w["state"] for w in cluster.flow.status()["workers"]}

        await cluster.workers["decode-0"].kill()
        async with asyncio.timeout(10):
            while states()["decode-0"] != "dead":
                await cluster.flow.line.changed(0.2)
        cluster.directory.update(Role.DECODE, ())  # what the platform notices later
        await asyncio.sleep(0)
        await cluster.flow.line.changed(0.2)
        assert states() == {"decode-0": "dead", "prefill-0": "ready"}
        await cluster.start_workers(["decode-0"])
        async with asyncio.timeout(10):
            while states()["decode-0"] != "ready":
                await cluster.flow.line.changed(0.2)
        assert len(states()) == len(cluster.flow.status()["workers"]) == 2
