"""Both ends of a handoff without engines: a pool, a ledger, and what drives or answers transfers.

Run as a module it is a process that takes one JSON command a line and answers with one JSON line;
`python -m tests.support.handoff_sides decode` or `... prefill`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys

import numpy as np

from cluster.kv.allocator import BlockLedger
from cluster.kv.hashing import chain_seed
from cluster.kv.layout import KvLayout, LayerShape
from cluster.kv.pool import KvPool
from cluster.types import (
    AttemptKey,
    GenerationJob,
    Incarnation,
    RequestId,
    Role,
    SamplingParams,
    TokenDelta,
    WorkerAddress,
    WorkerId,
)
from cluster.wire.messages import Reserved
from cluster.wire.session import Identity, SessionOptions, SessionServer
from decode.receiver import Receiver
from prefill.handoff import Handoff

BLOCK_SIZE = 16
NUM_BLOCKS = 400
FRAME_BYTES = 1 << 20
# 256 KiB a block: 16 tokens x 8 layers x 2 x (4 heads x 64) x 4 bytes
LAYOUT = KvLayout((LayerShape(4, 64, 4, 64),) * 8, "float32", BLOCK_SIZE)
OPTIONS = SessionOptions(b"secret", heartbeat_s=0.25, dead_after_s=2.0)


def identity(role, layout=LAYOUT):
    name = WorkerId(f"{role.value}-0")
    described = {"fingerprint": "f", **layout.describe()}
    return Identity(role, name, Incarnation(f"{role.value}-life"), described)


def seed_for(salt):
    return chain_seed("f", salt)


def make_job(name, num_tokens, *, attempt=1, first=0, max_tokens=8, salt=""):
    key = AttemptKey(RequestId(name), attempt)
    tokens = tuple(range(first, first + num_tokens))
    return GenerationJob(key, tokens, SamplingParams(max_tokens), salt)


def job_args(job):
    """What a child process needs to make the same job."""
    return {
        "name": job.key.request,
        "attempt": job.key.attempt,
        "num_tokens": len(job.prompt_token_ids),
        "first": job.prompt_token_ids[0] if job.prompt_token_ids else 0,
        "max_tokens": job.sampling.max_tokens,
        "salt": job.cache_salt,
    }


def num_blocks(job):
    return -(-len(job.prompt_token_ids) // BLOCK_SIZE)


def content(job, index):
    """Bytes of the job's block: like KV, a function of the tokens up to the block's end."""
    tokens = job.prompt_token_ids[: (index + 1) * BLOCK_SIZE]
    text = f"{job.cache_salt}|{tokens}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(LAYOUT.block_bytes)


def digest_of(blocks):
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def expected_digest(job):
    return digest_of(content(job, index) for index in range(num_blocks(job)))


def first_output(job, token=7):
    return TokenDelta(job.key, 0, (token,), cached_tokens=0)


class DecodeSide:
    """A receiver that keeps what was attached until it is told to let go."""

    def __init__(self, layout=LAYOUT, blocks=NUM_BLOCKS):
        self.pool = KvPool(layout, blocks)
        self.ledger = BlockLedger(blocks, layout.block_size)
        self.attached = {}
        self.failed = {}
        self.changed = asyncio.Event()
        self.receiver = Receiver(
            self.pool,
            self.ledger,
            block_size=layout.block_size,
            frame_bytes=FRAME_BYTES,
            checksum=True,
            seed_for=seed_for,
            on_attach=self._attach,
            on_failed=self._fail,
            on_freed=lambda: None,
        )
        self.server = SessionServer(identity(Role.DECODE, layout), self.receiver, OPTIONS)

    async def start(self):
        control = await self.server.start()
        me = identity(Role.DECODE)
        return WorkerAddress(me.peer, me.role, me.incarnation, control, os.getpid())

    async def stop(self):
        await self.receiver.stop()
        await self.server.stop()

    def reserve(self, job):
        return self.receiver.reserve("ingress", job)

    def digest(self, key):
        rows, _first, _phases = self.attached[key]
        return digest_of(self.pool.rows[row].numpy().tobytes() for row in rows)

    def let_go(self, key):
        self.ledger.release(self.attached.pop(key)[0])
        self.ledger.forget(key)

    async def until(self, condition, timeout_s=20.0):
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _attach(self, job, rows, first, phases):
        self.attached[job.key] = rows, first, phases
        self.changed.set()

    def _fail(self, key, error):
        self.failed[key] = error.message
        self.changed.set()


class PrefillSide:
    """A handoff fed by a pretended engine."""

    def __init__(self, layout=LAYOUT, blocks=NUM_BLOCKS, options=OPTIONS):
        self.pool = KvPool(layout, blocks)
        self.ledger = BlockLedger(blocks, layout.block_size)
        self.rows = {}
        self.done = {}
        self.changed = asyncio.Event()
        self.handoff = Handoff(
            identity(Role.PREFILL, layout),
            options,
            self.pool,
            self.ledger,
            block_size=layout.block_size,
            frame_bytes=FRAME_BYTES,
            checksum=True,
            on_done=self._done,
            seed_for=seed_for,
        )

    def compute(self, job):
        """Allocate and fill the job's rows, as the engine would by its last chunk."""
        rows = self.ledger.allocate(num_blocks(job))
        for index, row in enumerate(rows):
            self.pool.rows[row].numpy()[:] = np.frombuffer(content(job, index), np.uint8)
        self.rows[job.key] = rows

    def send(self, job, address):
        """The whole life of a transfer, the prompt computed in three chunks."""
        self.send_part(job, address)
        self.handoff.finish(job.key, first_output(job))

    def send_part(self, job, address):
        """A transfer whose prompt is still being computed: two thirds of it may go."""
        self.compute(job)
        self.handoff.start(job, address)
        self.bind(job)
        for third in (1, 2):
            self.handoff.progress(job.key, len(job.prompt_token_ids) * third // 3)

    def bind(self, job):
        """As the engine does: the handoff takes references, the engine's own go."""
        rows = self.rows.pop(job.key)
        self.handoff.bind(job.key, rows)
        self.ledger.release(rows)

    async def until_done(self, *keys, timeout_s=20.0):
        async with asyncio.timeout(timeout_s):
            while not all(key in self.done for key in keys):
                self.changed.clear()
                await self.changed.wait()
        return [self.done[key] for key in keys]

    def _done(self, key, error):
        assert key not in self.done, f"{key} reported twice"
        self.done[key] = None if error is None else error.message
        self.changed.set()


def free_blocks(side):
    counts = side.ledger.counts()
    return counts.free + counts.cached if not counts.promised else -1


# ---- as a process ----


def _facts(side):
    side.ledger.check_integrity()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return {"free": free_blocks(side), "threads": threads, "fds": fds, "pid": os.getpid()}


async def _serve_decode(command, side):
    what = command.pop("do")
    if what == "reserve":
        return isinstance(side.reserve(make_job(**command)), Reserved)
    if what == "facts":
        facts = {"open": side.receiver.open_transfers, "ignored": side.receiver.num_ignored}
        facts |= {"bytes": side.receiver.bytes_received, "sessions": side.receiver.num_sessions}
        return facts | _facts(side)
    key = AttemptKey(RequestId(command["name"]), command.get("attempt", 1))
    if what == "attached":
        await side.until(lambda: key in side.attached)
        _rows, first, phases = side.attached[key]
        digest = side.digest(key)
        return {"digest": digest, "token": first.token_ids[0], "phase": phases[0].name}
    if what == "let_go":
        side.let_go(key)
    if what == "cancel":
        side.receiver.cancel(key)
    if what == "failed":
        await side.until(lambda: key in side.failed)
        return side.failed[key]
    return None


async def _serve_prefill(command, side):
    what = command.pop("do")
    if what in {"send", "send_part"}:
        address = command.pop("address")
        me = identity(Role.DECODE)
        decode = WorkerAddress(me.peer, me.role, me.incarnation, address, 0)
        side.send(make_job(**command), decode)
    if what == "facts":
        return {"bytes": side.handoff.bytes_sent, "open": side.handoff.open_transfers} | _facts(
            side
        )
    if what == "done":
        key = AttemptKey(RequestId(command["name"]), command.get("attempt", 1))
        return (await side.until_done(key))[0]
    return None


async def _main(role):
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    def say(answer):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    if role == "decode":
        side, serve = DecodeSide(), _serve_decode
        say((await side.start()).control)
    else:
        side, serve = PrefillSide(), _serve_prefill
        say("ready")
    while line := await lines.readline():
        command = json.loads(line)
        if command == {"do": "renew"}:
            await side.stop()
            side = DecodeSide()
            say((await side.start()).control)
        else:
            say(await serve(command, side))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
