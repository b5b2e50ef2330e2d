"""A crowd of streaming clients, a fifth of which leave: in the queue, in prefill, in handoff and
in decode. Everyone who stays must get the text that an unsplit worker gives without a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.cluster_process import ClusterProcess

CONCURRENCY = 32
STAGES = ("queue", "prefill", "handoff", "decode")
LOOK_AGAIN_S = 0.01
QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """One request, and the stage at which its client leaves, if it does."""

    prompt: tuple[int, ...]
    max_tokens: int
    leave_in: str | None = None


def make_orders(token_ids: Sequence[int], count: int, *, seed: int) -> list[Order]:
    """Distinct prompts of 24 to 120 tokens, 16 to 64 new ones; every fifth client leaves."""
    draw = random.Random(seed)
    orders = []
    for index in range(count):
        length = draw.randint(24, 120)
        start = draw.randrange(len(token_ids) - length)
        marker = (token_ids[index % len(token_ids)], token_ids[(index * 7 + 3) % len(token_ids)])
        leave_in = STAGES[(index // 5) % len(STAGES)] if index % 5 == 4 else None
        prompt = (*marker, *token_ids[start : start + length])
        orders.append(Order(prompt, draw.randint(16, 64), leave_in))
    assert len({order.prompt for order in orders}) == count
    return orders


def body(order: Order) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": list(order.prompt),
        "max_tokens": order.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


class Storm:
    """Runs orders against one cluster over HTTP."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
        self._tickets = asyncio.Semaphore(CONCURRENCY)

    async def run(self, orders: Sequence[Order]) -> list[str | None]:
        """Texts of those who stayed, None for those who left."""
        async with self._client:
            return list(await asyncio.gather(*(self._serve(order) for order in orders)))

    async def _serve(self, order: Order) -> str | None:
        async with self._tickets:
            label = f"storm-{random.getrandbits(64):x}"
            reading = asyncio.create_task(self._read(order, label))
            if order.leave_in in ("queue", "prefill"):
                await self._until_stage(label, order.leave_in, reading)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                return None
            return await reading

    async def _read(self, order: Order, label: str) -> str | None:
        headers = {"x-request-id": label}
        post = self._client.stream("POST", "/v1/completions", json=body(order), headers=headers)
        async with post as response:
            assert response.status_code == 200, await response.aread()
            pieces = []
            async for line in response.aiter_lines():
                if order.leave_in == "handoff" and line:
                    return None  # token 1 is here before the blocks are there
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    pieces += [choice["text"] for choice in chunk["choices"]]
                if order.leave_in == "decode" and len(pieces) > 4:
                    return None
            return "".join(pieces)

    async def _until_stage(self, label: str, stage: str, reading: asyncio.Task[Any]) -> None:
        """Watch the request until it is in `stage`, past it, or over."""
        while not reading.done():
            records = (await self._client.get("/debug/requests")).json()
            mine = next((record for record in records if record["label"] == label), None)
            if mine is not None and STAGES.index(mine["stage"]) >= STAGES.index(stage):
                return
            await asyncio.sleep(LOOK_AGAIN_S)


def held(cluster: ClusterProcess) -> list[dict[str, Any]]:
    """Workers that still hold something: the leak check's first half."""
    return [worker for worker in cluster.status()["workers"] if not _is_empty(worker)]


def _is_empty(worker: dict[str, Any]) -> bool:
    blocks = worker["blocks"]
    counters = ("running", "waiting", "tickets", "open_transfers")
    free = blocks["free"] + blocks["cached"] == blocks["total"]
    return free and all(worker[name] == 0 for name in counters)


async def until_nothing_is_held(cluster: ClusterProcess) -> None:
    async with asyncio.timeout(QUIET_S):
        while await asyncio.to_thread(held, cluster):
            pass  # each look is a command of its own and takes its time


def resources(cluster: ClusterProcess) -> dict[str, tuple[int, int]]:
    """Threads and descriptors of each worker."""
    return {w["id"]: (w["threads"], w["fds"]) for w in cluster.status()["workers"]}


def cancellations(metrics: str) -> dict[str, float]:
    """`cancellations_total` by phase."""
    prefix = 'diptych_cancellations_total{phase="'
    lines = [line for line in metrics.splitlines() if line.startswith(prefix)]
    return {line[len(prefix) :].split('"')[0]: float(line.split()[-1]) for line in lines}


async def disconnect_storm(
    split: ClusterProcess, expected: Sequence[str], orders: Sequence[Order]
) -> dict[str, float]:
    """The scenario: all who stay get `expected`, nothing stays held, every stage saw a cancel.

    Returns the cancellations by phase.
    """
    warm_up = [Order(order.prompt[:24], 16) for order in orders[:CONCURRENCY]]
    await Storm(split.url).run(warm_up)
    await until_nothing_is_held(split)
    before = resources(split)
    texts = await Storm(split.url).run(orders)
    for order, text, wanted in zip(orders, texts, expected, strict=True):
        if order.leave_in is None:
            assert text == wanted, order
    await until_nothing_is_held(split)
    for worker, (threads, fds) in resources(split).items():
        assert threads <= before[worker][0] + 1, (worker, threads, before)
        assert fds <= before[worker][1] + 2, (worker, fds, before)
    async with httpx.AsyncClient(base_url=split.url) as client:
        return cancellations((await client.get("/metrics")).text)
