"""Starts and ends what is measured: clusters of the product, and rivals.

Each stack is a process of its own session, started like a user would and ready when it prints its
`ready: URL` line. Promises that nothing of a stack is left when its block ends, and that a stack
that does not start is one error with its last words.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from cluster.bench.client import BenchError, Endpoint
from cluster.bench.procs import read_stack
from cluster.clock import monotonic_s
from cluster.config import Config, load_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

READY = "ready: "
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
GONE_TIMEOUT_S = 10.0
SHOWN_LINES = 15


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the product."""

    name: str
    overrides: tuple[str, ...]  # as for `diptych up --set`

    @property
    def config(self) -> Config:
        """The whole config that the overrides make."""
        return load_config(None, list(self.overrides))


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack."""

    endpoint: Endpoint
    session: int  # POSIX session id of all its processes
    secret: str  # lets the bench open sessions to workers
    start_s: float


@asynccontextmanager
async def cluster_stack(setup: Setup) -> AsyncIterator[Stack]:
    """`diptych up` with the setup's overrides, on a free port."""
    command = [sys.executable, "-m", "router.cli", "up"]
    for override in (*setup.overrides, f"cluster.name=bench-{secrets.token_hex(3)}", "http.port=0"):
        command += ["--set", override]
    async with _stack(command, setup.config.served_name) as stack:
        yield stack


@asynccontextmanager
async def rival_stack(module: str, *args: str) -> AsyncIterator[Stack]:
    """A rival under `cluster.bench.rivals`, on a free port."""
    command = [sys.executable, "-m", f"cluster.bench.rivals.{module}", *args]
    async with _stack(command, "rival") as stack:
        yield stack


@asynccontextmanager
async def _stack(command: Sequence[str], model: str) -> AsyncIterator[Stack]:
    started_s = monotonic_s()
    secret = secrets.token_hex(16)
    # env(1) and not os.environ: the product reads its environment in one module
    variables = ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"DIPTYCH_SECRET={secret}"]
    process = await asyncio.create_subprocess_exec(
        *variables,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    drain: asyncio.Task[None] | None = None
    try:
        url = await _until_ready(process)
        drain = asyncio.create_task(_discard(process))
        endpoint = Endpoint.of(url, model)
        yield Stack(endpoint, process.pid, secret, monotonic_s() - started_s)
    finally:
        await _stop(process)
        if drain is not None:
            drain.cancel()


async def _until_ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            async for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip()
                if line.startswith(READY):
                    return line.removeprefix(READY).split()[0]
                seen.append(line)
    except TimeoutError:
        seen.append(f"(not ready within {START_TIMEOUT_S:.0f} s)")
    raise BenchError("a stack did not start:\n" + "\n".join(seen[-SHOWN_LINES:]))


async def _discard(process: asyncio.subprocess.Process) -> None:
    """Keep the pipe empty, so that nothing blocks on it."""
    assert process.stdout is not None
    while await process.stdout.read(65_536):
        pass


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask, then insist; returns when no process of the session is left."""
    session = process.pid
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
    left = [each for each in psutil.process_iter() if each.pid in read_stack(session)]
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, timeout=GONE_TIMEOUT_S)
    for each in alive:
        each.kill()


# ---- the product's setups --------------------------------------------------------------------

KV_BLOCKS = 2560  # all setups: room for every request of every burst at once


def split(cores: int) -> Setup:
    """One prefill and one decode worker, the cores shared between them."""
    threads = max(1, cores // 2)
    return Setup(
        "split 1+1",
        (
            "mode=disaggregated",
            f"pools.prefill.threads={threads}",
            f"pools.decode.threads={threads}",
            f"pools.prefill.kv_blocks={KV_BLOCKS}",
            f"pools.decode.kv_blocks={KV_BLOCKS}",
        ),
    )


def aggregated(replicas: int, threads: int) -> Setup:
    """Workers that prefill and decode."""
    return Setup(
        f"aggregated x{replicas}",
        (
            "mode=aggregated",
            f"pools.decode.replicas={replicas}",
            f"pools.decode.threads={threads}",
            f"pools.decode.kv_blocks={KV_BLOCKS}",
        ),
    )


def timed(num_streams: int, tokens_per_s: float, total_tokens: int) -> Setup:
    """Steps that only take time: one token a stream and step, `tokens_per_s` steps a second."""
    kv_blocks = num_streams * (-(-total_tokens // 16) + 1)
    return Setup(
        "diptych",
        (
            "engine=timed",
            f"timed.decode_a_s={1 / tokens_per_s}",
            "timed.decode_b_s_per_seq=0",
            "timed.prefill_b_s_per_token=0",
            f"pools.prefill.max_running={num_streams}",
            f"pools.decode.max_running={num_streams}",
            f"pools.prefill.kv_blocks={kv_blocks}",
            f"pools.decode.kv_blocks={kv_blocks}",
        ),
    )
