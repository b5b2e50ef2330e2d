"""Turns what flow and ingress observe into metrics.

The one place that knows how a request's record maps to the instruments of `cluster/telemetry.py`,
so that neither the request path nor the instruments know each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.telemetry import Metrics, RequestSample
from router.flow import FlowObserver
from router.http.settings import IngressObserver

if TYPE_CHECKING:
    from cluster.types import WorkerSnapshot
    from router.records import RequestRecord

_PHASES = {  # instrument: phases of the record that it sums
    "queue": ("admit", "prefill.queue"),
    "tokenize": ("tokenize",),
    "prefill": ("prefill.compute",),
    "handoff": ("handoff",),
    "decode_queue": ("decode.queue",),
    "decode": ("decode",),
}


class MetricsObserver(FlowObserver, IngressObserver):
    """Give the same object to the flow and to the ingress."""

    def __init__(self, metrics: Metrics) -> None:
        """Feed `metrics`."""
        self._metrics = metrics
        self.token_gap = metrics.token_gap  # type: ignore[method-assign]  # once a token: no hop

    def request_answered(self, code: int) -> None:
        """A generation request ended with this status."""
        self._metrics.request_answered(code)

    def worker_reported(self, snapshot: WorkerSnapshot) -> None:
        """A worker sent its state; its totals are kept even if it dies before a scrape."""
        self._metrics.worker_reported(snapshot)

    def request_over(self, record: RequestRecord, cancelled_in: str | None) -> None:
        """A client request that reached the flow ended."""
        self._metrics.request_over(request_sample(record, cancelled_in))
        for phase in record.phases:
            if phase.name == "route":
                self._metrics.decision_made(phase.duration_s)
        if record.status == "failed" and record.decision is None:
            self._metrics.request_rejected(record.error_code or "internal_error")


def request_sample(record: RequestRecord, cancelled_in: str | None) -> RequestSample:
    """What a finished record contributes to the metrics."""
    phases = {
        name: [phase.duration_s for phase in record.phases if phase.name in parts]
        for name, parts in _PHASES.items()
    }
    return RequestSample(
        status="completed" if record.status == "running" else record.status,
        finish_reason=record.finish_reason,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        ttft_s=record.ttft_s,
        tpot_s=record.tpot_s,
        e2e_s=record.e2e_s,
        phases_s={name: sum(durations) for name, durations in phases.items() if durations},
        cancelled_in=cancelled_in,
        decision=_placed(record),
        retries=tuple(attempt.reason for attempt in record.attempts[1:]),
    )


def _placed(record: RequestRecord) -> str | None:
    """How the request was placed; None if it never was."""
    decision = record.decision
    return None if decision is None or decision.kind == "wait" else decision.kind
