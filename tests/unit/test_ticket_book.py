"""Tickets: promises before prefill, idempotent, fenced by attempts, bounded by deadlines."""

from __future__ import annotations

import pytest

from cluster.kv.allocator import BlockLedger
from cluster.types import AttemptKey, GenerationJob, RequestId, SamplingParams
from cluster.wire.messages import Refused, Reserved
from decode.tickets import TicketBook


@pytest.fixture
def ledger():
    return BlockLedger(20, 16)


@pytest.fixture
def book(ledger):
    return TicketBook(ledger, block_size=16)


def make_job(name="r", attempt=1, num_tokens=40, max_tokens=8, deadline_s=600.0):
    key = AttemptKey(RequestId(name), attempt)
    return GenerationJob(
        key, tuple(range(num_tokens)), SamplingParams(max_tokens), deadline_s=deadline_s
    )


def test_a_ticket_promises_prompt_and_head_room_once(book, ledger):
    job = make_job()
    first = book.reserve("a", job, 0.0)
    assert first == Reserved(job.key, 3)  # 40 prompt tokens and 7 that will hold KV
    assert book.reserve("a", job, 1.0) == first
    assert ledger.counts().promised == 3
    assert len(book) == 1


def test_no_room_is_a_refusal_with_a_forecast_that_may_be_tried_again(book, ledger):
    big, small = make_job("big", num_tokens=290, max_tokens=2), make_job("small")
    assert isinstance(book.reserve("a", big, 0.0), Reserved)
    refused = book.reserve("a", small, 0.0)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == ("overloaded", 0.2)
    book.cancel(big.key, 1.0)
    assert isinstance(book.reserve("a", small, 2.0), Reserved)
    ledger.check_integrity()


def test_a_job_that_never_fits_is_refused_for_good(book):
    refused = book.reserve("a", make_job(num_tokens=320, max_tokens=2), 0.0)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == ("context_length_exceeded", None)


def test_a_ticket_is_taken_once_and_its_promise_goes_with_it(book, ledger):
    job = make_job()
    book.reserve("a", job, 0.0)
    assert book.take(job.key) == job
    assert book.take(job.key) is None
    assert book.find(job.key) is None
    assert len(book) == 0
    assert isinstance(book.reserve("a", job, 1.0), Reserved)  # a repeat changes nothing
    book.cancel(job.key, 2.0)
    assert ledger.counts().promised == 3  # its taker's business


def test_cancelled_and_lower_attempts_are_refused(book, ledger):
    early = make_job("late cancel")
    book.cancel(early.key, 0.0)  # before it was ever reserved
    assert book.reserve("a", early, 1.0).code == "stale_attempt"
    assert isinstance(book.reserve("a", make_job("late cancel", attempt=2), 1.0), Reserved)
    assert book.reserve("a", make_job("late cancel", attempt=1), 1.0).code == "stale_attempt"
    assert ledger.counts().promised == 3


def test_tombstones_are_forgotten_after_a_minute(book):
    job = make_job()
    book.cancel(job.key, 0.0)
    assert isinstance(book.reserve("a", job, 59.0), Refused)
    assert isinstance(book.reserve("a", job, 61.0), Reserved)


def test_expiry_and_a_lost_session_free_what_waits_and_nothing_else(book, ledger):
    taken, short, other = (
        make_job("taken", deadline_s=5),
        make_job("short", deadline_s=5),
        make_job("o"),
    )
    for session, job in (("a", taken), ("a", short), ("b", other)):
        book.reserve(session, job, 0.0)
    book.take(taken.key)
    assert book.expire(4.0) == ()
    assert book.expire(5.0) == (short.key,)
    assert book.drop_session("b", 6.0) == (other.key,)
    assert ledger.counts().promised == 3
    assert isinstance(book.reserve("b", other, 7.0), Refused)


def test_cancels_of_unknown_attempts_stay_bounded(book):
    for number in range(30_000):
        book.cancel(AttemptKey(RequestId(str(number)), 1), 0.0)
    assert len(book._attempts._over) <= 20_000
