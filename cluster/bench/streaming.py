"""Section `cpu`: processor time of a whole stack for each streamed token.

Many streams at a fixed rate on one stack after another: the product with `engine: timed`, a
default Ray Serve app and a bare uvicorn app. Counted are all processes of the stack and not the
client, over a window in which every stream runs. A stack's idle use is measured first, so that
the cost of its tokens can also be told from the cost of its being there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cluster.bench.client import BenchError, Tally, encode_request, open_streams
from cluster.bench.procs import CpuUse, difference, read_stack
from cluster.bench.stacks import cluster_stack, rival_stack, timed
from cluster.bench.workload import token_ids
from cluster.clock import monotonic_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cluster.bench.client import Stream
    from cluster.bench.report import Report
    from cluster.bench.stacks import Stack

    StackMaker = Callable[[], AbstractAsyncContextManager[Stack]]

PROMPT_TOKENS = 32
RAMP_S = 20.0  # streams last this much longer than the window: starting takes its time
START_TIMEOUT_S = 60.0
POLL_S = 0.05
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams at what rate, and how long they are watched."""

    num_streams: int
    tokens_per_s: float  # of each stream
    window_s: float
    idle_window_s: float

    @property
    def output_tokens(self) -> int:
        """More than a stream can emit until the window is over."""
        return int(self.tokens_per_s * (self.window_s + RAMP_S))


@dataclass(frozen=True, slots=True)
class StreamingCost:
    """What one stack used."""

    tokens_per_s: float  # of all streams together, seen by the client
    cpu_s_per_token: float
    idle_cores: float  # processor seconds a second, before the load
    cores: float  # the same under load
    by_process_s_per_token: dict[str, float]

    @property
    def above_idle_s_per_token(self) -> float:
        """Without what the stack uses for being there."""
        return (self.cores - self.idle_cores) / self.tokens_per_s


async def run(report: Report, loads: list[Load]) -> None:
    """Measure every stack at every load and report."""
    kept = []
    for load in loads:
        rows = []
        for name, make in _stacks(load, with_serve=load is loads[0]):
            title = f"{name}, {load.num_streams} streams x {load.tokens_per_s:g} tokens/s"
            with report.phase(f"cpu, {title}"):
                async with make() as stack:
                    cost = await measure(stack, load)
            rows.append(_row(name, cost))
            kept.append({"stack": name, "load": asdict(load), "cost": asdict(cost)})
            for process, used_s in list(cost.by_process_s_per_token.items())[:5]:
                report.say(f"          {used_s * 1e6:7.1f} us  {process}")
        report.table(
            f"Processor time for each streamed token, {load.num_streams} streams x "
            f"{load.tokens_per_s:g} tokens/s, client excluded",
            ("stack", "tok/s", "us/token", "above idle", "cores", "idle cores"),
            rows,
        )
    report.keep("cpu", {"measured": kept})


def _stacks(load: Load, *, with_serve: bool) -> list[tuple[str, StackMaker]]:
    rate = str(load.tokens_per_s)
    setup = timed(load.num_streams, load.tokens_per_s, PROMPT_TOKENS + load.output_tokens)
    stacks: list[tuple[str, StackMaker]] = [
        ("diptych, engine: timed", lambda: cluster_stack(setup))
    ]
    if with_serve:  # it cannot keep a higher rate up
        stacks.append(
            ("default Ray Serve app", lambda: rival_stack("serve_app", "--tokens-per-s", rate))
        )
    stacks.append(("bare uvicorn app", lambda: rival_stack("uvicorn_app", "--tokens-per-s", rate)))
    return stacks


def _row(name: str, cost: StreamingCost) -> list[str]:
    return [
        name,
        f"{cost.tokens_per_s:.0f}",
        f"{cost.cpu_s_per_token * 1e6:.0f}",
        f"{cost.above_idle_s_per_token * 1e6:.0f}",
        f"{cost.cores:.2f}",
        f"{cost.idle_cores:.3f}",
    ]


async def measure(stack: Stack, load: Load) -> StreamingCost:
    """Idle first, then all streams at once.

    Raises:
        BenchError: some stream did not start, or ended within the window.
    """
    idle, idle_span_s = await watch_idle(stack, load.idle_window_s)
    source = random.Random(f"{load}")
    tally = Tally()
    streams = await open_streams(stack.endpoint, load.num_streams, tally)
    try:
        for stream in streams:
            prompt = token_ids(source, PROMPT_TOKENS)
            stream.send(encode_request(stack.endpoint, prompt, load.output_tokens))
        deadline_s = monotonic_s() + START_TIMEOUT_S
        while tally.num_started < load.num_streams:
            await asyncio.sleep(POLL_S)
            await _check(streams, late=monotonic_s() > deadline_s)
        await asyncio.sleep(SETTLE_S)
        use, num_tokens, span_s = await _watch(stack, tally, load.window_s)
        await _check(streams, late=False)
    finally:
        for stream in streams:
            stream.abort()
    return StreamingCost(
        tokens_per_s=num_tokens / span_s,
        cpu_s_per_token=use.total_s / num_tokens,
        idle_cores=idle.total_s / idle_span_s,
        cores=use.total_s / span_s,
        by_process_s_per_token={name: s / num_tokens for name, s in use.by_label_s.items()},
    )


async def _check(streams: list[Stream], *, late: bool) -> None:
    """No stream may be over, and all must have started in time."""
    for stream in streams:
        if stream.is_over:
            await stream.finished(0)
            raise BenchError("a stream ended within the window")
    waiting = sum(not stream.trace.chunk_s for stream in streams)
    if late and waiting:
        raise BenchError(f"{waiting} streams have not started within {START_TIMEOUT_S:.0f} s")


async def watch_idle(stack: Stack, window_s: float) -> tuple[CpuUse, float]:
    """What a stack uses while nobody asks it anything, and in how many seconds."""
    await asyncio.sleep(SETTLE_S)
    use, _, span_s = await _watch(stack, Tally(), window_s)
    return use, span_s


async def _watch(stack: Stack, tally: Tally, window_s: float) -> tuple[CpuUse, int, float]:
    before, num_before, since_s = read_stack(stack.session), tally.num_chunks, monotonic_s()
    await asyncio.sleep(window_s)
    after, num_after, now_s = read_stack(stack.session), tally.num_chunks, monotonic_s()
    return difference(before, after), num_after - num_before, now_s - since_s
