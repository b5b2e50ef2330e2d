"""Values that cross an edge between rooms or processes.

Everything here is frozen, slotted and free of behaviour beyond derived numbers, so that it can be
sent by msgspec, compared in tests and replayed in the simulator. Times are durations in seconds
(`_s`): no message ever carries a time of day. Never imports torch, ray, redis or asyncio.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)  # our uuid, one per (client request, prompt, choice)
WorkerId = NewType("WorkerId", str)  # e.g. "prefill-0"; kept by the successor of a dead worker
Incarnation = NewType("Incarnation", str)  # random, new for each process life of a worker
TransferId = NewType("TransferId", int)  # unique within one (prefill, decode) session
BlockId = NewType("BlockId", int)  # row of the pool
BlockHash = NewType("BlockHash", bytes)  # SHA-256 chain value, 32 bytes


class Role(StrEnum):
    """Which end of the system a session peer is."""

    INGRESS = "ingress"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why a generation ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class WorkerState(StrEnum):
    """Life of a worker as `status` shows it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """Names one attempt at one internal request; every message and token carries it."""

    request: RequestId
    attempt: int  # 1-based


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop. Defaults are greedy.

    `eos_token_ids` is already empty when the client asked for `ignore_eos`. Until `min_tokens`
    tokens exist, EOS and stop tokens are masked out of the distribution, not merely ignored.
    """

    max_tokens: int
    temperature: float = 0.0  # 0 means greedy
    top_p: float = 1.0
    seed: int = 0  # 64-bit, chosen by the ingress when the client gives none
    choice: int = 0  # index among `n`; part of the draw's counter
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One internal request as a worker receives it."""

    key: AttemptKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""  # tenant namespace of the prefix cache
    deadline_s: float = 600.0  # seconds left when the message was sent
    traceparent: str | None = None
    forced_token_ids: tuple[int, ...] = ()  # output already delivered by earlier attempts

    @property
    def total_tokens(self) -> int:
        """Most tokens this job can ever hold KV for: the last sampled token needs none."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens for sessions."""

    worker: WorkerId
    role: Role
    incarnation: Incarnation
    control: str  # "host:port", numeric
    pid: int


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One phase of a request on the worker that ran it; the ingress places it in time."""

    name: str  # DESIGN section 3: "prefill.queue", "prefill.compute", "handoff", ...
    ended_ago_s: float  # between the phase's end and the sending of this record
    duration_s: float


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one attempt, `position` being the output index of the first of them."""

    key: AttemptKey
    position: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    cached_tokens: int | None = None  # set once, by the worker that ran prefill
    phases: tuple[PhaseRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The ledger in numbers; the four states add up to `total`, promises are on top."""

    total: int
    free: int
    loading: int
    live: int
    cached: int
    promised: int


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One link as seen from the prefill worker that drives it."""

    decode: WorkerId
    transport: str
    state: str  # "connecting" | "ready" | "broken" | "closed"
    epoch: int
    gb_per_s: float | None  # of recent frames; None before the first


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What a worker tells every ingress about itself, once a heartbeat and on change."""

    worker: WorkerId
    role: Role
    pid: int
    incarnation: Incarnation
    state: WorkerState
    running: int
    waiting: int
    waiting_tokens: int  # prompt tokens queued or still to be computed
    blocks: BlockCounts
    tickets: int
    open_transfers: int
    sessions: int
    prefill_tokens: int  # computed in this process life
    generated_tokens: int
    preemptions: int
    handoff_bytes_sent: int
    handoff_bytes_received: int
    busy_s: float  # seconds spent inside steps
    prefill_tokens_per_s: float  # learned from the worker's own steps
    decode_step_s: float
    threads: int
    fds: int
    rss_bytes: int
    start_phases_s: dict[str, float]
    links: tuple[LinkStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router must know of the model without loading it."""

    served_name: str
    fingerprint: str  # hex; content of weights, tokenizer, template, dtype, rope, block size
    revision: str
    max_len: int  # tokens, prompt plus output
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...]
