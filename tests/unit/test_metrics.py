"""From a request's record to the metrics."""

from cluster.telemetry import Metrics, Slo, Sources
from router.metrics import MetricsObserver
from router.policy import Decision
from router.records import RequestRecord


def scrape(record: RequestRecord) -> str:
    sources = Sources(list, tuple, lambda: 0)
    metrics = Metrics(sources, build={"version": "1"}, slo=Slo(ttft_s=None, tpot_s=None))
    MetricsObserver(metrics).request_over(record, None)
    return metrics.render()


def record_of(**fields) -> RequestRecord:
    return RequestRecord("id", "trace", "default", received_s=0.0, prompt_tokens=5, **fields)


def test_the_time_of_every_decision_is_observed():
    record = record_of(status="completed")
    record.add_phase("route", "ingress", 0.1, 0.25, 1)
    record.add_phase("route", "ingress", 0.5, 0.25, 2)
    text = scrape(record)
    assert "diptych_routing_seconds_count 2.0" in text
    assert "diptych_routing_seconds_sum 0.5" in text


def test_a_request_that_never_got_a_worker_counts_as_rejected():
    rejected = scrape(record_of(status="failed", error_code="overloaded"))
    assert 'diptych_admission_rejects_total{reason="overloaded"} 1.0' in rejected
    placed = Decision("least_loaded", "local", None, None, degraded=False, candidates=())
    failed = scrape(record_of(status="failed", error_code="handoff_failed", decision=placed))
    assert "diptych_admission_rejects_total{" not in failed
