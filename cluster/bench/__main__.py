"""`python -m cluster.bench`: run the sections, print their tables, write `out/bench.json`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from cluster.bench import live, streaming, throughput
from cluster.bench.live import LiveSizes
from cluster.bench.report import Report
from cluster.bench.streaming import Load
from cluster.bench.workload import BURSTS, QUICK_BURSTS
from cluster.errors import DiptychError

SECTIONS = ("idle", "lag", "ttft", "cpu", "throughput")
REPETITIONS = 2
NUM_STREAMS = 256
SLOW_TOKENS_PER_S = 3.0  # of each stream; what a default Serve app can keep up
FAST_TOKENS_PER_S = 20.0


def main() -> int:
    """Parse, run, report; returns the exit code."""
    args = _parser().parse_args()
    names = args.only.split(",") if args.only else list(SECTIONS)
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        sys.stderr.write(f"--only: no section {unknown[0]}; there are {', '.join(SECTIONS)}\n")
        return 2
    report = Report("bench")
    report.head()
    try:
        asyncio.run(_run(report, names, args))
    except DiptychError as error:
        sys.stderr.write(f"bench: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 1
    report.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.bench", description=__doc__)
    parser.add_argument("--only", metavar="A,B", help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument(
        "--repetitions", type=int, default=REPETITIONS, help="of throughput (default %(default)s)"
    )
    return parser


async def _run(report: Report, names: list[str], args: argparse.Namespace) -> None:
    if live.NAMES & set(names):
        sizes = LiveSizes(3.0, 4.0, 2, (32,)) if args.quick else LiveSizes()
        await live.run(report, names, sizes)
    if "cpu" in names:
        await streaming.run(report, _loads(quick=args.quick))
    if "throughput" in names:
        bursts = QUICK_BURSTS if args.quick else BURSTS
        await throughput.run(report, bursts, 1 if args.quick else args.repetitions)


def _loads(*, quick: bool) -> list[Load]:
    if quick:
        return [Load(16, SLOW_TOKENS_PER_S, 3.0, 2.0)]
    return [
        Load(NUM_STREAMS, rate, window_s=10.0, idle_window_s=8.0)
        for rate in (SLOW_TOKENS_PER_S, FAST_TOKENS_PER_S)
    ]


if __name__ == "__main__":
    sys.exit(main())
