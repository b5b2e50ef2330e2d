"""Sections on one split cluster with the real model: `idle`, `lag` and `ttft`.

`idle`: cores used while nobody asks. `lag`: how late the event loops answer while both engines
compute. `ttft`: time to first token of split against aggregated, one request at a time, in pairs
whose order alternates, with the same number of compute threads a worker; both clusters run, and
the one that is not asked is idle.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from cluster.bench.client import run_burst
from cluster.bench.probes import IngressProbe, SessionProbe, ask_nobody, sample
from cluster.bench.stacks import aggregated, cluster_stack, split
from cluster.bench.stats import pair_ratio, percentile
from cluster.bench.streaming import watch_idle
from cluster.bench.throughput import BURST_TIMEOUT_S, warm_up
from cluster.bench.workload import token_ids
from cluster.config import available_cores

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.bench.client import Endpoint
    from cluster.bench.report import Report
    from cluster.bench.stacks import Stack

LAG_STREAMS = 6  # closed loop: a request that ends is followed by another
LAG_PROMPT_TOKENS = 256
LAG_OUTPUT_TOKENS = 48
TTFT_OUTPUT_TOKENS = 2
NAMES = frozenset({"idle", "lag", "ttft"})


@dataclass(frozen=True, slots=True)
class LiveSizes:
    """How long and how often the sections measure."""

    idle_window_s: float = 20.0
    lag_window_s: float = 20.0
    pairs: int = 12
    prompt_lengths: tuple[int, ...] = (128, 512)


async def run(report: Report, names: Collection[str], sizes: LiveSizes) -> None:
    """Measure the named sections."""
    cores = available_cores()
    async with AsyncExitStack() as running:
        with report.phase("start split 1+1"):
            stack = await running.enter_async_context(cluster_stack(split(cores)))
            await warm_up(stack.endpoint)
        if "idle" in names:
            with report.phase("idle"):
                await _idle(report, stack, sizes)
        if "lag" in names:
            with report.phase("lag"):
                await _lag(report, stack, sizes)
        if "ttft" in names:
            with report.phase("start aggregated x1, same threads a worker"):
                setup = aggregated(1, max(1, cores // 2))
                other = await running.enter_async_context(cluster_stack(setup))
                await warm_up(other.endpoint)
            with report.phase("ttft"):
                await _ttft(report, stack.endpoint, other.endpoint, sizes)


async def _idle(report: Report, stack: Stack, sizes: LiveSizes) -> None:
    use, span_s = await watch_idle(stack, sizes.idle_window_s)
    rows = [[name, f"{used_s / span_s:.4f}"] for name, used_s in use.by_label_s.items()]
    report.table(
        f"Idle, split 1+1, {span_s:.0f} s: processor time as a fraction of a core",
        ("process", "cores"),
        [*rows, ["all", f"{use.total_s / span_s:.4f}"]],
    )
    by_process = {name: used_s / span_s for name, used_s in use.by_label_s.items()}
    report.keep("idle", {"cores": use.total_s / span_s, "by_process": by_process})


async def _lag(report: Report, stack: Stack, sizes: LiveSizes) -> None:
    ingress = await IngressProbe.open(stack.endpoint)
    workers = {
        worker["id"]: await SessionProbe.open(worker, stack.secret)
        for worker in (await ingress.status())["workers"]
    }
    asks = {"ingress": ingress.ask, **{name: probe.ask for name, probe in workers.items()}}
    asks["this client's own lag"] = ask_nobody
    load = asyncio.create_task(_keep_busy(stack.endpoint))
    try:
        taken = await asyncio.gather(*(sample(ask, sizes.lag_window_s) for ask in asks.values()))
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        ingress.close()
        for probe in workers.values():
            probe.close()
    taken_s = dict(zip(asks, taken, strict=True))
    report.table(
        f"Round trip of a no-op while {LAG_STREAMS} x {LAG_PROMPT_TOKENS}/{LAG_OUTPUT_TOKENS} run "
        "on split 1+1, ms",
        ("event loop of", "p50", "p99", "max", "samples"),
        [
            [name, *(f"{percentile(s, rank) * 1000:.2f}" for rank in (50, 99, 100)), str(len(s))]
            for name, s in taken_s.items()
        ],
    )
    report.keep("lag", {"round_trips_s": taken_s})


async def _keep_busy(endpoint: Endpoint) -> None:
    """Requests without end, `LAG_STREAMS` at a time; a failed one ends the bench's load."""
    source = random.Random("lag")

    async def one_after_another() -> None:
        while True:
            prompt = token_ids(source, LAG_PROMPT_TOKENS)
            await run_burst(endpoint, [prompt], LAG_OUTPUT_TOKENS, BURST_TIMEOUT_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(LAG_STREAMS):
            group.create_task(one_after_another())


async def _ttft(report: Report, split_: Endpoint, aggregated_: Endpoint, sizes: LiveSizes) -> None:
    source = random.Random("ttft")
    rows = []
    kept = {}
    for length in sizes.prompt_lengths:
        split_s: list[float] = []
        aggregated_s: list[float] = []
        for pair in range(sizes.pairs):
            prompt = token_ids(source, length)
            turns = [(split_, split_s), (aggregated_, aggregated_s)]
            for endpoint, taken_s in itertools.islice(
                itertools.cycle(turns), pair % 2, pair % 2 + 2
            ):
                (trace,) = await run_burst(endpoint, [prompt], TTFT_OUTPUT_TOKENS, BURST_TIMEOUT_S)
                taken_s.append(trace.ttft_s)
        ratio = pair_ratio(split_s, aggregated_s)
        rows.append(
            [
                str(length),
                f"{median(split_s) * 1000:.1f}",
                f"{median(aggregated_s) * 1000:.1f}",
                f"{median(split_s) / median(aggregated_s):.3f}",
                ratio.text(3),
            ]
        )
        kept[str(length)] = {"split_s": split_s, "aggregated_s": aggregated_s}
    report.table(
        f"TTFT, one request at a time, {sizes.pairs} interleaved pairs, same threads a worker",
        (
            "prompt tokens",
            "split ms",
            "aggregated ms",
            "ratio of medians",
            "median pair (quartiles)",
        ),
        rows,
    )
    report.keep("ttft", {"samples": kept})
