"""The handoff between two processes over real sessions and gloo links, content compared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace

import pytest
import pytest_asyncio

from cluster.types import Incarnation, Role, WorkerAddress
from cluster.wire.session import SessionServer
from tests.support.child import Child
from tests.support.handoff_sides import (
    BLOCK_SIZE,
    LAYOUT,
    NUM_BLOCKS,
    OPTIONS,
    PrefillSide,
    expected_digest,
    first_output,
    free_blocks,
    identity,
    job_args,
    make_job,
    num_blocks,
)
from tests.support.recorder import Recorder

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULE = "tests.support.handoff_sides"
BIG_TOKENS = 180 * BLOCK_SIZE  # 47 MB


def address_of(child_or_control):
    control = getattr(child_or_control, "hello", child_or_control)
    me = identity(Role.DECODE)
    return WorkerAddress(me.peer, me.role, me.incarnation, control, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child():
    """One decode process for all tests that leave it alive; starting one takes seconds."""
    async with Child(MODULE, "decode") as decode:
        yield decode


@pytest_asyncio.fixture(loop_scope="module")
async def decode(child):
    """That process with a new, empty decode side."""
    child.hello = await child.ask("renew")
    return child


@contextlib.asynccontextmanager
async def prefill_side(layout=LAYOUT):
    """A prefill side in this process."""
    prefill = PrefillSide(layout)
    try:
        yield prefill
    finally:
        await prefill.handoff.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def prefill():
    async with prefill_side() as prefill:
        yield prefill


async def reserved(decode, job):
    assert await decode.ask("reserve", **job_args(job)) is True
    return job


async def assert_arrived(prefill, decode, job):
    """The job's KV is on the decode side, equal to its source; both sides let go."""
    assert await prefill.until_done(job.key) == [None]
    arrived = await decode.ask("attached", name=job.key.request, attempt=job.key.attempt)
    assert arrived == {"digest": expected_digest(job), "token": 7, "phase": "handoff"}
    await decode.ask("let_go", name=job.key.request, attempt=job.key.attempt)


async def assert_nothing_held(prefill, decode):
    facts = await decode.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
    assert facts["open"] == 0
    prefill.ledger.check_integrity()
    assert free_blocks(prefill) == NUM_BLOCKS
    assert prefill.handoff.open_transfers == 0


async def half_sent(prefill, decode, job):
    """Start a transfer whose prompt stays unfinished, and wait until two thirds have arrived."""
    await reserved(decode, job)
    prefill.send_part(job, address_of(decode))
    part_bytes = len(job.prompt_token_ids) * 2 // 3 // BLOCK_SIZE * LAYOUT.block_bytes
    await decode.facts_when(lambda facts: facts["bytes"] == part_bytes)


async def test_every_length_arrives_whole_and_only_whole_rows_travel(prefill, decode):
    sent_blocks = 0
    for number, num_tokens in enumerate((1, 15, 16, 17, 32, 83, 640)):
        job = await reserved(decode, make_job(f"r{num_tokens}", num_tokens, first=number * 1000))
        prefill.send(job, address_of(decode))
        await assert_arrived(prefill, decode, job)
        sent_blocks += num_blocks(job)
    assert prefill.handoff.bytes_sent == sent_blocks * LAYOUT.block_bytes
    assert (await decode.ask("facts"))["bytes"] == prefill.handoff.bytes_sent
    (link,) = prefill.handoff.links()
    assert (link.state, link.transport, link.decode) == ("ready", "gloo", "decode-0")
    assert link.gb_per_s > 0
    await assert_nothing_held(prefill, decode)


async def test_rows_travel_while_the_prompt_is_still_computed(prefill, decode):
    job = make_job("r", 30 * BLOCK_SIZE)
    await half_sent(prefill, decode, job)
    prefill.handoff.finish(job.key, first_output(job))
    await assert_arrived(prefill, decode, job)


async def test_rows_the_decode_worker_has_are_not_sent_again(prefill, decode):
    first = await reserved(decode, make_job("first", 4 * BLOCK_SIZE + 5))
    prefill.send(first, address_of(decode))
    await assert_arrived(prefill, decode, first)
    before = prefill.handoff.bytes_sent

    longer = await reserved(decode, make_job("longer", 6 * BLOCK_SIZE))
    prefill.send(longer, address_of(decode))
    await assert_arrived(prefill, decode, longer)
    assert prefill.handoff.bytes_sent - before == 2 * LAYOUT.block_bytes

    again = await reserved(decode, make_job("again", 6 * BLOCK_SIZE))
    prefill.send(again, address_of(decode))
    await assert_arrived(prefill, decode, again)
    assert prefill.handoff.bytes_sent - before == 2 * LAYOUT.block_bytes  # not one row more

    salted = await reserved(decode, make_job("salted", 6 * BLOCK_SIZE, salt="tenant b"))
    prefill.send(salted, address_of(decode))
    await assert_arrived(prefill, decode, salted)
    assert prefill.handoff.bytes_sent - before == 8 * LAYOUT.block_bytes
    await assert_nothing_held(prefill, decode)


async def test_many_transfers_at_once_keep_their_content_apart(prefill, decode):
    jobs = [make_job(f"r{n}", 1 + 11 * n, first=1000 * n) for n in range(30)]
    for job in jobs:
        await reserved(decode, job)
    for job in jobs:
        prefill.send(job, address_of(decode))
    for job in jobs:
        await assert_arrived(prefill, decode, job)
    await assert_nothing_held(prefill, decode)


async def test_the_prefill_side_gives_up_midway_and_the_link_goes_on(prefill, decode):
    job = make_job("given up", 120 * BLOCK_SIZE)
    await half_sent(prefill, decode, job)
    (before,) = prefill.handoff.links()
    prefill.handoff.cancel(job.key)
    assert await prefill.until_done(job.key) == ["cancelled"]
    after = await reserved(decode, make_job("after", 90 * BLOCK_SIZE, first=5000))
    prefill.send(after, address_of(decode))
    await assert_arrived(prefill, decode, after)
    await assert_nothing_held(prefill, decode)
    (link,) = prefill.handoff.links()
    assert (link.state, link.epoch) == ("ready", before.epoch)


async def test_given_up_right_after_the_start_harms_nobody_else(prefill, decode):
    jobs = [make_job(f"r{n}", 20 * BLOCK_SIZE, first=1000 * n) for n in range(12)]
    for job in jobs:
        await reserved(decode, job)
    for number, job in enumerate(jobs):
        prefill.send(job, address_of(decode))
        if number % 2:
            prefill.handoff.cancel(job.key)
    for number, job in enumerate(jobs):
        if number % 2:
            assert await prefill.until_done(job.key) == ["cancelled"]
            await decode.ask("cancel", name=job.key.request)
        else:
            await assert_arrived(prefill, decode, job)
    await assert_nothing_held(prefill, decode)


async def test_the_decode_side_cancels_midway_and_reuses_its_rows(prefill, decode):
    job = make_job("cancelled", 200 * BLOCK_SIZE)
    await half_sent(prefill, decode, job)
    await decode.ask("cancel", name="cancelled")
    # 280 of 400 rows: cannot be had without those of the cancelled transfer
    after = await reserved(decode, make_job("after", 280 * BLOCK_SIZE, first=9000))
    prefill.handoff.finish(job.key, first_output(job))  # the engine knows nothing yet
    (error,) = await prefill.until_done(job.key)
    assert "cancelled on the decode worker" in error
    prefill.send(after, address_of(decode))
    await assert_arrived(prefill, decode, after)
    await assert_nothing_held(prefill, decode)
    assert await decode.ask("reserve", **job_args(job)) is False  # its tombstone


async def test_an_offer_needs_a_ticket_for_exactly_this_job(prefill, decode):
    prefill.send(make_job("no ticket", 40), address_of(decode))
    (error,) = await prefill.until_done(make_job("no ticket", 40).key)
    assert "no ticket for attempt 1 of no ticket" in error

    await reserved(decode, make_job("other tokens", 40, first=100))
    impostor = make_job("other tokens", 40, first=200)
    prefill.send(impostor, address_of(decode))
    (error,) = await prefill.until_done(impostor.key)
    assert "block hashes differ" in error

    await reserved(decode, make_job("other length", 40))
    impostor = make_job("other length", 41)
    prefill.send(impostor, address_of(decode))
    (error,) = await prefill.until_done(impostor.key)
    assert "41 tokens offered, the ticket says 40" in error
    for name in ("other tokens", "other length"):
        await decode.ask("cancel", name=name)
    await assert_nothing_held(prefill, decode)


async def test_workers_that_do_not_fit_say_which_field_differs(decode):
    async with prefill_side(replace(LAYOUT, dtype="bfloat16")) as prefill:
        job = await reserved(decode, make_job("r", 40))
        prefill.handoff.start(job, address_of(decode))
        (error,) = await prefill.until_done(job.key)
        assert "kv_dtype differs: here bfloat16, decode-0 (decode) has float32" in error
        assert prefill.handoff.links()[0].state == "broken"


async def test_nobody_there_and_a_successor_there_both_fail_the_job(prefill, decode):
    gone = replace(address_of(decode), incarnation=Incarnation("an earlier life"))
    job = make_job("r", 40)
    prefill.handoff.start(job, gone)
    (error,) = await prefill.until_done(job.key)
    assert "incarnation" in error
    nobody = replace(address_of(decode), control="127.0.0.1:1")
    job = make_job("r2", 40)
    prefill.handoff.start(job, nobody)
    (error,) = await prefill.until_done(job.key)
    assert "127.0.0.1:1" in error


async def test_a_decode_worker_that_never_accepts_fails_the_job(monkeypatch):
    monkeypatch.setattr("prefill.route._ACCEPT_TIMEOUT_S", 0.2)
    silent = Recorder()
    server = SessionServer(identity(Role.DECODE), silent, OPTIONS)
    prefill = PrefillSide()
    try:
        job = make_job("r", 40)
        prefill.send(job, address_of(await server.start()))
        (error,) = await prefill.until_done(job.key)
        assert "no ACCEPT within 0.2 s" in error
        assert free_blocks(prefill) == NUM_BLOCKS
    finally:
        await prefill.handoff.stop()
        await server.stop()


async def test_a_link_can_be_opened_ahead_of_need(prefill, decode):
    await asyncio.wait_for(prefill.handoff.warm(address_of(decode)), 10)
    assert prefill.handoff.links()[0].state == "ready"
    job = await reserved(decode, make_job("r", 40))
    prefill.send(job, address_of(decode))
    await assert_arrived(prefill, decode, job)


async def test_a_killed_prefill_worker_frees_the_decode_side_at_once(decode):
    for attempt in range(1, 3):
        async with Child(MODULE, "prefill") as prefill:
            job = make_job("killed", BIG_TOKENS, attempt=attempt, first=attempt)
            await reserved(decode, job)
            await prefill.ask("send_part", address=decode.hello, **job_args(job))
            await decode.facts_when(lambda facts: facts["open"] == 1)
            started_s = time.monotonic()
            prefill.kill()
            error = await decode.ask("failed", name="killed", attempt=attempt)
            await decode.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
            assert time.monotonic() - started_s < 5
            assert "prefill-0 was lost" in error
    prefill = PrefillSide()
    job = await reserved(decode, make_job("next", BIG_TOKENS))
    prefill.send(job, address_of(decode))
    await assert_arrived(prefill, decode, job)
    await assert_nothing_held(prefill, decode)
    await prefill.handoff.stop()


async def test_a_prefill_worker_killed_in_the_middle_of_a_frame(decode):
    """Killed while everything moves: whatever had arrived whole is right, the rest is freed."""
    before = await decode.ask("facts")
    for attempt in range(1, 4):
        async with Child(MODULE, "prefill") as prefill:
            job = make_job("killed", BIG_TOKENS, attempt=attempt, first=attempt)
            await reserved(decode, job)
            bytes_before = (await decode.ask("facts"))["bytes"]
            await prefill.ask("send", address=decode.hello, **job_args(job))
            await decode.facts_when(lambda facts, old=bytes_before: facts["bytes"] > old)
            prefill.kill()
            facts = await decode.facts_when(lambda facts: facts["open"] == 0)
            if facts["free"] != NUM_BLOCKS:
                arrived = await decode.ask("attached", name="killed", attempt=attempt)
                assert arrived["digest"] == expected_digest(job)
                await decode.ask("let_go", name="killed", attempt=attempt)
            await decode.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
    # the I/O threads that were stuck in a frame end by its deadline
    await decode.facts_when(
        lambda facts: (
            facts["fds"] <= before["fds"] + 4 and facts["threads"] <= before["threads"] + 3
        ),
        timeout_s=15,
    )


async def test_a_killed_decode_worker_fails_the_job_and_frees_the_prefill_side():
    prefill = PrefillSide()
    for attempt in range(1, 3):
        async with Child(MODULE, "decode") as decode:
            job = make_job("killed", 120 * BLOCK_SIZE, attempt=attempt)
            await half_sent(prefill, decode, job)
            started_s = time.monotonic()
            decode.kill()
            (error,) = await prefill.until_done(job.key)
            assert time.monotonic() - started_s < 2
            assert error.startswith("decode-0: ")
            assert free_blocks(prefill) == NUM_BLOCKS
    async with Child(MODULE, "decode") as decode:  # and its successor is served
        job = await reserved(decode, make_job("after", 40))
        prefill.send(job, address_of(decode))
        await assert_arrived(prefill, decode, job)
        await prefill.handoff.stop()


async def test_a_stopped_decode_worker_is_given_up_and_served_again_later(prefill, decode):
    job = make_job("stopped", 120 * BLOCK_SIZE)
    await half_sent(prefill, decode, job)
    decode.stop()
    started_s = time.monotonic()
    prefill.handoff.finish(job.key, first_output(job))
    (error,) = await prefill.until_done(job.key)
    assert time.monotonic() - started_s < OPTIONS.dead_after_s + 1
    assert "silent" in error
    assert free_blocks(prefill) == NUM_BLOCKS
    decode.resume()
    await decode.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
    after = await reserved(decode, make_job("after", 100 * BLOCK_SIZE, first=3000))
    prefill.send(after, address_of(decode))
    await assert_arrived(prefill, decode, after)


async def test_a_stopped_prefill_worker_frees_the_decode_side_and_recovers(decode):
    async with Child(MODULE, "prefill") as prefill:
        job = await reserved(decode, make_job("stopped", 120 * BLOCK_SIZE))
        await prefill.ask("send_part", address=decode.hello, **job_args(job))
        await decode.facts_when(lambda facts: facts["bytes"] > 0)
        prefill.stop()
        started_s = time.monotonic()
        error = await decode.ask("failed", name="stopped")
        assert time.monotonic() - started_s < OPTIONS.dead_after_s + 1
        assert "silent" in error
        await decode.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
        prefill.resume()
        assert await prefill.ask("done", name="stopped") is not None
        await prefill.facts_when(lambda facts: facts["free"] == NUM_BLOCKS)
        after = await reserved(decode, make_job("after", 100 * BLOCK_SIZE, first=3000))
        await prefill.ask("send", address=decode.hello, **job_args(after))
        assert await prefill.ask("done", name="after") is None
        arrived = await decode.ask("attached", name="after")
        assert arrived["digest"] == expected_digest(after)


async def test_sessions_and_links_leave_nothing_behind(decode):
    async def once(decode, number):
        prefill = PrefillSide(blocks=8)
        job = await reserved(decode, make_job(f"r{number}", 40, first=number))
        prefill.send(job, address_of(decode))
        await assert_arrived(prefill, decode, job)
        await prefill.handoff.stop()
        await decode.facts_when(lambda facts: facts["sessions"] == 0)

    def in_use():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    for number in range(5):
        await once(decode, number)
    here, there = in_use(), await decode.ask("facts")
    for number in range(5, 55):
        await once(decode, number)
    threads, fds = in_use()
    assert threads <= here[0] + 2
    assert fds <= here[1] + 2
    await decode.facts_when(
        lambda facts: (
            facts["threads"] <= there["threads"] + 2
            and facts["fds"] <= there["fds"] + 2
            and facts["free"] == NUM_BLOCKS
        )
    )


@pytest.mark.parametrize("num_tokens", [1, 16, 100])
async def test_a_stop_with_open_transfers_ends_both_sides(prefill, decode, num_tokens):
    job = await reserved(decode, make_job("open", num_tokens))
    prefill.send_part(job, address_of(decode))
    await asyncio.wait_for(prefill.handoff.warm(address_of(decode)), 10)
    await prefill.handoff.stop()
    (error,) = await prefill.until_done(job.key)
    assert "stops" in error
    await decode.ask("cancel", name="open")
    await assert_nothing_held(prefill, decode)
