"""Section `throughput`: the same bursts on every setup, rotated within each repetition.

Only one setup exists at a time: each is started, warmed, measured and stopped before the next, so
none pays for another's idle processes. All setups may use all cores. `transformers` runs in its
own process in the first repetition only: it is the slowest and varies least.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from cluster.bench.client import BenchError, Endpoint, run_burst
from cluster.bench.stacks import aggregated, cluster_stack, split
from cluster.bench.stats import percentile, spread
from cluster.bench.workload import Workload
from cluster.config import available_cores, load_config, read_environment
from cluster.model.identity import read_json, resolve_dtype
from cluster.model.resolve import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.bench.client import Trace
    from cluster.bench.report import Report
    from cluster.bench.stacks import Setup

BURST_TIMEOUT_S = 240.0
PLAIN_TIMEOUT_S = 400.0
WARM_UP = Workload("warm-up", 4, 96, 8)
PLAIN = "transformers generate"


@dataclass(slots=True)
class Samples:
    """Everything measured of one setup on one workload, over all repetitions."""

    tokens_per_s: list[float] = field(default_factory=list)  # one a repetition
    ttft_s: list[float] = field(default_factory=list)  # one a request
    tpot_s: list[float] = field(default_factory=list)  # one a request

    def add(self, traces: Sequence[Trace]) -> None:
        """Take one burst: its span is from the first request to the last token."""
        span_s = max(t.chunk_s[-1] for t in traces) - min(t.sent_s for t in traces)
        self.tokens_per_s.append(sum(t.num_tokens for t in traces) / span_s)
        self.ttft_s += [trace.ttft_s for trace in traces]
        self.tpot_s += [trace.tpot_s for trace in traces if trace.tpot_s is not None]

    def add_batch(self, num_requests: int, token_s: Sequence[float]) -> None:
        """Take one static batch: all its rows get their tokens together."""
        self.tokens_per_s.append(num_requests * len(token_s) / token_s[-1])
        self.ttft_s += [token_s[0]] * num_requests
        self.tpot_s += [(token_s[-1] - token_s[0]) / (len(token_s) - 1)] * num_requests

    def row(self) -> list[str]:
        """Cells of the table."""
        return [
            spread(self.tokens_per_s).text(1),
            f"{percentile(self.ttft_s, 50):.2f}",
            f"{percentile(self.ttft_s, 99):.2f}",
            f"{percentile(self.tpot_s, 50) * 1000:.0f}",
            f"{percentile(self.tpot_s, 99) * 1000:.0f}",
        ]


def setups() -> list[Setup]:
    """Split, the fair baseline, and one worker that has all cores for itself."""
    cores = available_cores()
    return [split(cores), aggregated(2, max(1, cores // 2)), aggregated(1, cores)]


async def run(report: Report, bursts: Sequence[Workload], repetitions: int) -> None:
    """Measure and report."""
    names = [*(setup.name for setup in setups()), PLAIN]
    samples = {burst.name: {name: Samples() for name in names} for burst in bursts}
    for repetition in range(repetitions):
        order = setups()
        turn = repetition % len(order)
        for setup in order[turn:] + order[:turn]:
            with report.phase(f"throughput {repetition + 1}/{repetitions}, {setup.name}"):
                await _measure(setup, bursts, str(repetition), samples)
        if repetition == 0:
            with report.phase(f"throughput, {PLAIN}"):
                await _measure_plain(bursts, str(repetition), samples)
    for burst in bursts:
        _show(report, burst, samples[burst.name])
    report.keep(
        "throughput",
        {
            "repetitions": repetitions,
            "configs": {setup.name: setup.config.model_dump(mode="json") for setup in setups()},
            "workloads": [asdict(burst) for burst in bursts],
            "samples": {
                burst: {name: asdict(each) for name, each in rows.items()}
                for burst, rows in samples.items()
            },
        },
    )


def _show(report: Report, burst: Workload, rows: dict[str, Samples]) -> None:
    baseline = median(rows[setups()[1].name].tokens_per_s)
    report.table(
        f"{burst.name}, closed burst",
        ("setup", "tok/s", "TTFT p50 s", "p99 s", "TPOT p50 ms", "p99 ms", "vs aggregated x2"),
        [
            [name, *each.row(), f"{median(each.tokens_per_s) / baseline:.2f}"]
            for name, each in rows.items()
        ],
    )


async def _measure(
    setup: Setup,
    bursts: Sequence[Workload],
    seed: str,
    samples: dict[str, dict[str, Samples]],
) -> None:
    async with cluster_stack(setup) as stack:
        await warm_up(stack.endpoint)
        for burst in bursts:
            traces = await run_burst(
                stack.endpoint, burst.prompts(seed), burst.output_tokens, BURST_TIMEOUT_S
            )
            samples[burst.name][setup.name].add(traces)


async def warm_up(endpoint: Endpoint) -> None:
    """Let every worker and link do everything once."""
    await run_burst(endpoint, WARM_UP.prompts("0"), WARM_UP.output_tokens, BURST_TIMEOUT_S)


async def _measure_plain(
    bursts: Sequence[Workload], seed: str, samples: dict[str, dict[str, Samples]]
) -> None:
    config = load_config()
    folder = resolve_model(config.model.id, config.model.revision, read_environment().cache_dir)
    job = {
        "folder": str(folder.path),
        "dtype": resolve_dtype(read_json(folder.path / "config.json"), config.model.dtype),
        "threads": available_cores(),
        "bursts": [
            {"prompts": burst.prompts(seed), "output_tokens": burst.output_tokens}
            for burst in bursts
        ],
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.bench.rivals.plain_transformers",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PLAIN_TIMEOUT_S):
            output, complaint = await process.communicate(json.dumps(job).encode())
    except TimeoutError:
        raise BenchError(f"{PLAIN} took longer than {PLAIN_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BenchError(f"{PLAIN} failed: {complaint.decode(errors='replace')[-600:]}")
    for burst, line in zip(bursts, output.splitlines(), strict=True):
        samples[burst.name][PLAIN].add_batch(burst.num_requests, json.loads(line))
