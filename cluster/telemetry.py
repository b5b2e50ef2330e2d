"""Metrics: every instrument of the interface, on a registry of its own.

Owns names, labels and buckets. Requests are told to it as plain values; workers' figures are read
from their latest snapshots when someone scrapes, and their totals outlive restarts. Never blocks
and never sees a token's text. `run` measures the event loop it runs in.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.types import WorkerState
from cluster.worker_totals import WorkerTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from cluster.types import WorkerSnapshot

PREFIX = "diptych_"
LAG_PERIOD_S = 0.5
SLO_WINDOW_REQUESTS = 1_000

_FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75)
_TTFT_S = (*_FINE_S, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP_S = (*_FINE_S, 1, 2.5, 5, 10)
_E2E_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
_PHASE_S = (0.0001, 0.0005, *_TTFT_S)
_ROUTING_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)

PHASES = ("queue", "tokenize", "prefill", "handoff", "decode_queue", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """What one client request contributes when it is over; None where something did not happen."""

    status: Literal["completed", "failed", "cancelled"]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    phases_s: Mapping[str, float]  # keys of PHASES
    cancelled_in: str | None = None
    decision: str | None = None  # "split", "local" or "migrated"
    retries: tuple[str, ...] = ()  # reasons
    migrations: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """Where current figures come from, read at every scrape."""

    snapshots: Callable[[], Iterable[WorkerSnapshot]]  # latest of each listed worker
    degraded: Callable[[], Iterable[str]]  # reasons
    num_waiting: Callable[[], int]  # requests that no worker has yet


@dataclass(frozen=True, slots=True)
class Slo:
    """Promises that `slo_attainment_ratio` is measured against; None promises nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, sample: RequestSample) -> bool:
        """Whether a completed request kept both."""
        late = self.ttft_s is not None and (sample.ttft_s or 0.0) > self.ttft_s
        slow = self.tpot_s is not None and (sample.tpot_s or 0.0) > self.tpot_s
        return not late and not slow


class Metrics:
    """All metrics of one ingress and, through snapshots, of the cluster it sees."""

    def __init__(
        self, sources: Sources, *, build: Mapping[str, str], slo: Slo | None = None
    ) -> None:
        """Create every instrument.

        Args:
            sources: read at every scrape.
            build: labels of `build_info`, the version among them.
            slo: what attainment is measured against.
        """
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prom.CollectorRegistry(auto_describe=True)
        self._slo = slo or Slo()
        self._kept: deque[bool] = deque(maxlen=SLO_WINDOW_REQUESTS)
        self._sources = sources
        self._totals = WorkerTotals()
        self._build_latencies()
        self._build_counters()
        self._slo_ratio = self._gauge("slo_attainment_ratio", "Requests that kept both SLOs")
        self._slo_ratio.set(1.0)
        self._lag = self._gauge("event_loop_lag_seconds", "How late the event loop ran last")
        info = self._gauge("build_info", "Constant 1; the labels say what runs", tuple(build))
        info.labels(**build).set(1)
        self.registry.register(_WorkerCollector(sources, self._totals))

    # ---- told by the request path ---------------------------------------------------------------

    def request_answered(self, code: int) -> None:
        """A generation request ended with this HTTP status; 499 is a disconnect."""
        self._requests.labels(code=str(code)).inc()

    def token_gap(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` of one choice arrived together, `gap_s` after the one before them."""
        self._gap.observe(gap_s)
        for _ in range(num_tokens - 1):
            self._gap.observe(0.0)

    def request_over(self, sample: RequestSample) -> None:
        """A client request is over; called once for each."""
        if sample.ttft_s is not None:
            self._ttft.observe(sample.ttft_s)
            self._prompt_tokens.inc(sample.prompt_tokens)
            self._cached_tokens.inc(sample.cached_tokens)
        self._generation_tokens.inc(sample.completion_tokens)
        for name, duration_s in sample.phases_s.items():
            self._phases[name].observe(duration_s)
        if sample.decision is not None:
            self._decisions.labels(kind=sample.decision).inc()
        for reason in sample.retries:
            self._retries.labels(reason=reason).inc()
        self._migrations.inc(sample.migrations)
        if sample.status == "cancelled":
            self._cancellations.labels(phase=sample.cancelled_in or "stream").inc()
        elif sample.status == "completed":
            self._completed(sample)

    def request_rejected(self, reason: str) -> None:
        """Admission turned a request away."""
        self._rejects.labels(reason=reason).inc()

    def decision_made(self, duration_s: float) -> None:
        """The policy took this long."""
        self._routing.observe(duration_s)

    def worker_reported(self, snapshot: WorkerSnapshot) -> None:
        """Count a snapshot's totals now, so that nothing is lost if the worker dies unscraped."""
        self._totals.update(snapshot)

    def render(self) -> str:
        """The Prometheus text exposition."""
        return prom.generate_latest(self.registry).decode()

    async def run(self) -> None:
        """Measure event-loop lag and collect snapshots until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.set(max(0.0, loop.time() - due_s))
            for snapshot in self._sources.snapshots():
                self._totals.update(snapshot)

    # ---- inside ---------------------------------------------------------------------------------

    def _completed(self, sample: RequestSample) -> None:
        self._success.labels(finished_reason=sample.finish_reason or "stop").inc()
        if sample.e2e_s is not None:
            self._e2e.observe(sample.e2e_s)
        if sample.tpot_s is not None:
            self._tpot.observe(sample.tpot_s)
        self._kept.append(self._slo.is_met(sample))
        self._slo_ratio.set(sum(self._kept) / len(self._kept))

    def _build_latencies(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Request read to first content", _TTFT_S
        )
        self._gap = self._histogram("inter_token_latency_seconds", "Gaps between tokens", _GAP_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap of a request", _GAP_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Request read to last byte", _E2E_S
        )
        self._phases = {
            name: self._histogram(f"request_{name}_time_seconds", f"Time in {name}", _PHASE_S)
            for name in PHASES
        }
        self._routing = self._histogram("routing_seconds", "Time the policy took", _ROUTING_S)

    def _build_counters(self) -> None:
        self._requests = self._counter("requests", "Requests by HTTP status", ("code",))
        self._success = self._counter("request_success", "Completed requests", ("finished_reason",))
        self._cancellations = self._counter("cancellations", "Disconnects", ("phase",))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens taken from a cache")
        self._generation_tokens = self._counter("generation_tokens", "Tokens in answers")
        self._retries = self._counter("handoff_retries", "Further attempts", ("reason",))
        self._migrations = self._counter("migrations", "Requests moved to another decode worker")
        self._rejects = self._counter("admission_rejects", "Requests turned away", ("reason",))
        self._decisions = self._counter("decisions", "Routing decisions", ("kind",))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prom.Histogram:
        return prom.Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Counter:
        return prom.Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Gauge:
        return prom.Gauge(PREFIX + name, text, labels, registry=self.registry)


class _WorkerCollector(Collector):
    """Reads workers' snapshots when scraped."""

    def __init__(self, sources: Sources, totals: WorkerTotals) -> None:
        self._sources = sources
        self._totals = totals

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: the names of this collector are in this module alone."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples too."""
        snapshots = list(self._sources.snapshots())
        for snapshot in snapshots:
            self._totals.update(snapshot)
        yield from self._worker_totals()
        yield from self._worker_gauges(snapshots)
        reasons = _gauge_family("degraded", "1 for each reason", ["reason"])
        for reason in dict.fromkeys(self._sources.degraded()):
            reasons.add_metric([reason], 1)
        yield reasons

    def _worker_totals(self) -> Iterator[Metric]:
        labels = ["pool", "worker"]
        prefill = _counter_family("prefill_tokens", "Prompt tokens computed", labels)
        handoff = _counter_family("handoff_bytes", "KV bytes moved", [*labels, "direction"])
        busy = _counter_family("worker_busy_seconds", "Seconds inside steps", labels)
        preemptions = 0
        for role, worker, totals in self._totals.by_worker():
            where = [role.value, worker]
            prefill.add_metric(where, totals.prefill_tokens)
            handoff.add_metric([*where, "sent"], totals.handoff_bytes_sent)
            handoff.add_metric([*where, "received"], totals.handoff_bytes_received)
            busy.add_metric(where, totals.busy_s)
            preemptions += totals.preemptions
        preempted = _counter_family("num_preemptions", "Sequences that gave way", [])
        preempted.add_metric([], preemptions)
        yield from (prefill, handoff, busy, preempted)

    def _worker_gauges(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        alive = [snapshot for snapshot in snapshots if snapshot.state is not WorkerState.DEAD]
        running = _gauge_family("num_requests_running", "Requests in workers' steps", [])
        running.add_metric([], sum(snapshot.running for snapshot in alive))
        waiting = _gauge_family("num_requests_waiting", "Requests in any queue", [])
        queued = sum(snapshot.waiting for snapshot in alive)
        waiting.add_metric([], queued + self._sources.num_waiting())
        blocks = _gauge_family("kv_blocks", "Blocks by state", ["pool", "worker", "state"])
        start = _gauge_family("worker_start_seconds", "Start-up phases", ["worker", "phase"])
        for snapshot in alive:
            where = [snapshot.role.value, snapshot.worker]
            for state in ("free", "loading", "live", "cached"):
                blocks.add_metric([*where, state], getattr(snapshot.blocks, state))
            for phase, duration_s in snapshot.start_phases_s.items():
                start.add_metric([snapshot.worker, phase], duration_s)
        links = _gauge_family("links", "Prefill-decode links by state", ["state"])
        states = Tally(link.state for snapshot in alive for link in snapshot.links)
        for state in dict.fromkeys(("connecting", "ready", "broken", "closed", *states)):
            links.add_metric([state], states[state])
        yield from (running, waiting, blocks, start, links)


def _counter_family(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge_family(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)
