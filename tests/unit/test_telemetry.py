"""Metrics: names of the interface, totals that never go back, figures read when scraped."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry import PHASES, Metrics, RequestSample, Slo, Sources
from cluster.types import (
    BlockCounts,
    Incarnation,
    LinkStatus,
    Role,
    WorkerId,
    WorkerSnapshot,
    WorkerState,
)
from cluster.worker_totals import WorkerTotals
from router.metrics import MetricsObserver
from router.policy import Decision
from router.records import AttemptRecord, RequestRecord

SNAPSHOT = WorkerSnapshot(
    worker=WorkerId("prefill-0"),
    role=Role.PREFILL,
    pid=1,
    incarnation=Incarnation("a"),
    state=WorkerState.READY,
    running=2,
    waiting=3,
    waiting_tokens=30,
    blocks=BlockCounts(total=10, free=4, loading=1, live=3, cached=2, promised=1),
    tickets=0,
    open_transfers=0,
    sessions=1,
    prefill_tokens=100,
    generated_tokens=7,
    preemptions=1,
    handoff_bytes_sent=1_000,
    handoff_bytes_received=0,
    busy_s=1.5,
    prefill_tokens_per_s=10.0,
    decode_step_s=0.0,
    threads=1,
    fds=1,
    rss_bytes=1,
    start_phases_s={"load": 2.0},
    links=(LinkStatus(WorkerId("decode-0"), "gloo", "ready", 1, None),),
)

SAMPLE = RequestSample(
    status="completed",
    finish_reason="stop",
    prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=5,
    ttft_s=0.2,
    tpot_s=0.01,
    e2e_s=0.24,
    phases_s=dict.fromkeys(PHASES, 0.01),
    decision="split",
)


class Cluster:
    """Sources that a test can change."""

    def __init__(self):
        self.snapshots = [SNAPSHOT]
        self.degraded = []
        self.metrics = Metrics(
            Sources(lambda: self.snapshots, lambda: self.degraded, lambda: 4),
            build={"version": "1", "model": "m"},
            slo=Slo(ttft_s=1.0, tpot_s=0.05),
        )

    def scrape(self):
        """Family name to {label values: value} of its samples."""
        families = text_string_to_metric_families(self.metrics.render())
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def cluster():
    return Cluster()


def test_every_name_of_the_interface_is_there(cluster):
    text = cluster.metrics.render()
    phases = ["queue", "tokenize", "prefill", "handoff", "decode_queue", "decode"]
    names = [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        *(f"request_{phase}_time_seconds" for phase in phases),
        "routing_seconds",
        *["requests_total", "request_success_total", "cancellations_total", "prompt_tokens_total"],
        *["cached_tokens_total", "generation_tokens_total", "prefill_tokens_total"],
        *["handoff_bytes_total", "handoff_retries_total", "migrations_total"],
        *["num_preemptions_total", "admission_rejects_total", "decisions_total"],
        *["worker_busy_seconds_total", "num_requests_running", "num_requests_waiting", "kv_blocks"],
        *["links", "degraded", "slo_attainment_ratio", "event_loop_lag_seconds"],
        *["worker_start_seconds", "build_info"],
    ]
    for name in names:
        assert f"# TYPE diptych_{name} " in text, name
    assert "_created" not in text


def test_worker_figures(cluster):
    cluster.degraded = ["no decode workers", "no decode workers"]
    values = cluster.scrape()
    assert values["diptych_prefill_tokens_total", "prefill", "prefill-0"] == 100
    assert values["diptych_handoff_bytes_total", "prefill", "prefill-0", "sent"] == 1_000
    assert values["diptych_worker_busy_seconds_total", "prefill", "prefill-0"] == 1.5
    assert values[("diptych_num_preemptions_total",)] == 1
    assert values[("diptych_num_requests_running",)] == 2
    assert values[("diptych_num_requests_waiting",)] == 3 + 4
    states = ("free", "loading", "live", "cached")
    blocks = [values[("diptych_kv_blocks", *sorted(("prefill", "prefill-0", s)))] for s in states]
    assert sum(blocks) == SNAPSHOT.blocks.total
    assert values["diptych_links", "ready"] == 1
    assert values["diptych_degraded", "no decode workers"] == 1
    assert values["diptych_worker_start_seconds", "load", "prefill-0"] == 2.0
    assert values["diptych_build_info", "1", "m"] == 1


def test_totals_survive_a_restart_and_a_scale_down(cluster):
    name = ("diptych_prefill_tokens_total", "prefill", "prefill-0")
    assert cluster.scrape()[name] == 100
    reborn = replace(SNAPSHOT, incarnation=Incarnation("b"), prefill_tokens=5)
    cluster.snapshots = [reborn]
    assert cluster.scrape()[name] == 105
    cluster.snapshots = [SNAPSHOT]  # a late word of the dead process
    assert cluster.scrape()[name] == 105
    cluster.snapshots = []
    assert cluster.scrape()[name] == 105


def test_tokens_between_the_last_scrape_and_a_death_are_counted(cluster):
    cluster.scrape()
    cluster.metrics.worker_reported(replace(SNAPSHOT, prefill_tokens=130))
    cluster.snapshots = [replace(SNAPSHOT, incarnation=Incarnation("b"), prefill_tokens=0)]
    assert cluster.scrape()["diptych_prefill_tokens_total", "prefill", "prefill-0"] == 130


def test_totals_never_go_back_within_a_life():
    totals = WorkerTotals()
    totals.update(SNAPSHOT)
    totals.update(replace(SNAPSHOT, prefill_tokens=60, busy_s=9.0))
    [(_, _, now)] = totals.by_worker()
    assert (now.prefill_tokens, now.busy_s) == (100, 9.0)


def test_many_restarts_stay_bounded_and_exact():
    totals = WorkerTotals()
    for life in range(500):
        snapshot = replace(SNAPSHOT, incarnation=Incarnation(str(life)), prefill_tokens=1)
        totals.update(snapshot)
        totals.update(snapshot)
    [(_, _, now)] = totals.by_worker()
    assert now.prefill_tokens == 500


def test_dead_workers_hold_no_requests_and_no_blocks(cluster):
    cluster.snapshots = [replace(SNAPSHOT, state=WorkerState.DEAD)]
    values = cluster.scrape()
    assert values[("diptych_num_requests_running",)] == 0
    assert not any(key[0] == "diptych_kv_blocks" for key in values)


def test_requests(cluster):
    metrics = cluster.metrics
    metrics.request_over(SAMPLE)
    metrics.request_over(replace(SAMPLE, ttft_s=3.0))
    nothing = replace(SAMPLE, ttft_s=None, completion_tokens=0, phases_s={}, decision=None)
    metrics.request_over(replace(nothing, status="cancelled", cancelled_in="queue"))
    metrics.request_over(replace(nothing, status="failed", retries=("worker_lost",)))
    metrics.request_answered(200)
    metrics.request_answered(499)
    values = cluster.scrape()
    assert values[("diptych_prompt_tokens_total",)] == 20
    assert values[("diptych_cached_tokens_total",)] == 8
    assert values[("diptych_generation_tokens_total",)] == 10
    assert values[("diptych_time_to_first_token_seconds_count",)] == 2
    assert values["diptych_request_success_total", "stop"] == 2
    assert values["diptych_cancellations_total", "queue"] == 1
    assert values["diptych_handoff_retries_total", "worker_lost"] == 1
    assert values["diptych_decisions_total", "split"] == 2
    assert values["diptych_requests_total", "499"] == 1
    assert values[("diptych_slo_attainment_ratio",)] == 0.5


def test_tokens_that_arrive_together_are_gaps_of_zero(cluster):
    cluster.metrics.token_gap(0.5, 3)
    values = cluster.scrape()
    assert values[("diptych_inter_token_latency_seconds_count",)] == 3
    assert values[("diptych_inter_token_latency_seconds_sum",)] == 0.5


def test_a_record_becomes_a_sample(cluster):
    observer = MetricsObserver(cluster.metrics)
    record = RequestRecord(
        id="r", trace_id="t", tenant="default", received_s=100.0, prompt_tokens=8
    )
    record.status, record.finish_reason = "completed", "length"
    record.completion_tokens, record.ttft_s, record.e2e_s = 3, 0.5, 1.5
    record.decision = Decision("p", "local", False, None, WorkerId("decode-0"), ())
    record.attempts = [AttemptRecord(None, None, "first"), AttemptRecord(None, None, "retry")]
    for name, duration_s in (("admit", 0.1), ("prefill.queue", 0.2), ("decode", 0.3)):
        record.add_phase(name, "w", 100.0, duration_s)
    observer.request_over(record, None)
    observer.request_answered(200)
    observer.token_gap(0.1, 1)
    values = cluster.scrape()
    assert values[("diptych_request_queue_time_seconds_sum",)] == pytest.approx(0.3)
    assert values[("diptych_request_decode_time_seconds_sum",)] == pytest.approx(0.3)
    assert values[("diptych_request_time_per_output_token_seconds_sum",)] == pytest.approx(0.5)
    assert values[("diptych_request_handoff_time_seconds_count",)] == 0
    assert values["diptych_decisions_total", "local"] == 1
    assert values["diptych_handoff_retries_total", "retry"] == 1
    assert values["diptych_requests_total", "200"] == 1
    assert values[("diptych_inter_token_latency_seconds_count",)] == 1


async def test_running_measures_lag_and_collects_snapshots():
    read = asyncio.Event()

    def snapshots():
        read.set()
        return [SNAPSHOT]

    metrics = Metrics(Sources(snapshots, tuple, lambda: 0), build={"version": "1"})
    task = asyncio.create_task(metrics.run())
    await asyncio.wait_for(read.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 'worker="prefill-0"} 100.0' in metrics.render()
