"""What is remembered of each client request: the answer to "where did the time go".

A record collects phases, attempts and the routing decision while the request runs, and is kept,
with the last 10,000, when it has ended, failed and cancelled ones too. Phases of the ingress are
measured here; those of workers arrive as durations and are placed by their arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cluster.types import PhaseRecord, WorkerId
    from router.policy import Decision

MAX_RECORDS = 10_000
TTFT_PHASES = frozenset(
    {
        "accept",
        "tokenize",
        "admit",
        "route",
        "reserve",
        "prefill.queue",
        "prefill.compute",
        "first_flush",
    }
)

Status = Literal["running", "completed", "failed", "cancelled"]
Stage = Literal["queue", "prefill", "handoff", "decode"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on the request's own time line, seconds since it was fully read."""

    name: str
    worker: str
    start_s: float
    duration_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Which workers one attempt used, and why it was made."""

    prefill: WorkerId | None
    decode: WorkerId | None
    reason: str


@dataclass(slots=True)
class RequestRecord:
    """One client request; times are seconds since `received_s` (monotonic)."""

    id: str
    trace_id: str
    tenant: str
    received_s: float
    prompt_tokens: int
    label: str = ""  # the client's x-request-id
    status: Status = "running"
    stage: Stage = "queue"  # where the first choice is, or was when the request ended
    error_code: str | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    token_one_s: float | None = None  # arrival of the first token at the ingress
    ttft_s: float | None = None
    e2e_s: float | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    decision: Decision | None = None

    def add_phase(
        self, name: str, worker: str, start_s: float, duration_s: float, attempt: int = 1
    ) -> None:
        """Record a phase measured here; `start_s` is monotonic."""
        self.phases.append(Phase(name, worker, start_s - self.received_s, duration_s, attempt))

    def place(self, phase: PhaseRecord, worker: str, arrived_s: float, attempt: int) -> None:
        """Record a worker's phase by its age on arrival; the network's share stays unexplained."""
        start_s = arrived_s - phase.ended_ago_s - phase.duration_s
        self.add_phase(phase.name, worker, start_s, phase.duration_s, attempt)

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1), or None for fewer than two tokens."""
        if self.e2e_s is None or self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)

    @property
    def unexplained_s(self) -> float | None:
        """TTFT that no phase accounts for: network, event loops, wire."""
        if self.ttft_s is None:
            return None
        return self.ttft_s - sum(p.duration_s for p in self.phases if p.name in TTFT_PHASES)

    def duration_s(self, name: str) -> float | None:
        """Total time in phases of that name; None if there was none."""
        found = [phase.duration_s for phase in self.phases if phase.name == name]
        return sum(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `/debug/requests/{id}`."""
        return {
            "id": self.id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "label": self.label,
            "status": self.status,
            "stage": self.stage,
            "error": self.error_code,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "unexplained_s": self.unexplained_s,
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "phases": [asdict(p) for p in sorted(self.phases, key=lambda p: p.start_s)],
            "decision": None if self.decision is None else decision_dict(self.decision),
        }


def decision_dict(decision: Decision) -> dict[str, Any]:
    """The `decision` object of the debug route."""
    return {
        "policy": decision.policy,
        "kind": decision.kind,
        "degraded": decision.degraded,
        "chosen": [decision.prefill, decision.decode],
        "candidates": [asdict(candidate) for candidate in decision.candidates],
    }


class RequestLog:
    """The newest records by id."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        """Older records are forgotten beyond `max_records`."""
        self._max_records = max_records
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Remember a request that starts."""
        self._records[record.id] = record
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record, if it is still kept."""
        return self._records.get(request_id)

    def newest_first(self) -> list[RequestRecord]:
        """All kept records."""
        return list(reversed(self._records.values()))
