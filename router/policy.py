"""Which workers serve a request: one pure function over values.

A policy sees a `RoutingView` (what this ingress knows of every live worker, its own recent choices
included) and a `RouteRequest`, and answers with a `Decision` that names the pair, or decode alone
for local prefill, or asks to wait. It never sends anything, reads no clock and draws no random
number of its own, so the same object can be replayed from a decision log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from cluster.types import WorkerId

MAX_PREFILL_QUEUE_S = 2.0  # predicted seconds queued on P; the rest waits at the ingress


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A live prefill worker."""

    worker: WorkerId
    queued_tokens: int  # prompt tokens not yet computed, our own recent submissions included
    tokens_per_s: float  # learned; 0 while unknown
    pool_tokens: int  # capacity of its pool

    @property
    def queue_s(self) -> float:
        """Predicted wait of a prompt that joins now."""
        return self.queued_tokens / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A live decode worker."""

    worker: WorkerId
    requests: int  # running, waiting or ticketed, our own recent reservations included
    free_tokens: int  # room not promised to anyone, evictable cache included
    tokens_per_s: float  # of local prefill; 0 while unknown
    step_s: float  # recent decode step; 0 while unknown


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Everything a policy may know."""

    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]
    is_disaggregated: bool
    local_prefill_max_tokens: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy needs of the request."""

    prompt_tokens: int
    max_tokens: int
    mode: Literal["auto", "split", "local"] = "auto"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that was considered, with its predicted cost."""

    prefill: WorkerId | None
    decode: WorkerId
    ttft_s: float | None  # None: not yet predictable
    tpot_s: float | None
    cached_tokens: int
    queue_s: float
    transfer_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice. `decode` None means: nobody has room now, wait for a change."""

    policy: str
    kind: Literal["split", "local", "wait"]
    prefill: WorkerId | None
    decode: WorkerId | None
    degraded: bool
    candidates: tuple[Candidate, ...]


class Policy(Protocol):
    """How users plug in their own."""

    def choose(self, view: RoutingView, request: RouteRequest) -> Decision:
        """Pick the workers of one request."""


class LeastLoaded:
    """Shortest prefill queue, fewest decode requests; local prefill when there is no other way."""

    name = "least_loaded"

    def choose(self, view: RoutingView, request: RouteRequest) -> Decision:
        """Pick the least loaded worker of each pool; ties go to the lower id."""
        decodes = sorted(view.decode, key=lambda d: (d.requests, d.worker))
        prefills = sorted(
            (p for p in view.prefill if p.pool_tokens >= request.prompt_tokens),
            key=lambda p: (p.queue_s, p.queued_tokens, p.worker),
        )
        degraded = view.is_disaggregated and not view.prefill
        wants_local = (
            not view.is_disaggregated
            or not prefills
            or request.mode == "local"
            or (request.mode == "auto" and request.prompt_tokens <= view.local_prefill_max_tokens)
        )
        if wants_local:
            candidates = tuple(_candidate(None, decode, request) for decode in decodes)
            return self._decide("local", candidates, degraded=degraded)
        candidates = tuple(
            _candidate(prefill, decode, request)
            for prefill in prefills
            for decode in decodes
            if prefill.queue_s <= MAX_PREFILL_QUEUE_S
        )
        return self._decide("split", candidates, degraded=degraded)

    def _decide(
        self,
        kind: Literal["split", "local"],
        candidates: tuple[Candidate, ...],
        *,
        degraded: bool,
    ) -> Decision:
        if not candidates:
            return Decision(self.name, "wait", None, None, degraded, ())
        best = candidates[0]
        return Decision(self.name, kind, best.prefill, best.decode, degraded, candidates)


def _candidate(prefill: PrefillView | None, decode: DecodeView, request: RouteRequest) -> Candidate:
    rate = decode.tokens_per_s if prefill is None else prefill.tokens_per_s
    queue_s = 0.0 if prefill is None else prefill.queue_s
    return Candidate(
        prefill=None if prefill is None else prefill.worker,
        decode=decode.worker,
        ttft_s=queue_s + request.prompt_tokens / rate if rate > 0 else None,
        tpot_s=decode.step_s or None,
        cached_tokens=0,
        queue_s=queue_s,
        transfer_s=None,
    )
