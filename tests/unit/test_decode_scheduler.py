"""The decode scheduler: attach, local prefill, growth, finish rules, cancel."""

from __future__ import annotations

import pytest

from cluster.errors import ContextLengthError, LedgerError
from cluster.kv.tickets import can_ever_fit, ticket_blocks
from cluster.types import FinishReason
from tests.support.chain_model import EOS, make_job, oracle
from tests.support.decode_worker import BLOCK, DecodeWorker, assert_quiet, key_of, tokens_of


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 23, 40])
def test_attached_and_local_generate_the_same(num_tokens):
    prompt = [at % 5 for at in range(num_tokens)]
    worker = DecodeWorker()
    for name in ("cold", "warm"):
        remote, local = make_job(f"remote-{name}", prompt, 9), make_job(f"local-{name}", prompt, 9)
        worker.attach(remote)
        worker.add_local(local)
        tokens = tokens_of(worker.run())
        expected = oracle(local)
        assert tokens[f"local-{name}"] == expected
        assert tokens[f"remote-{name}"] == expected[1:]
    assert_quiet(worker)


def test_positions_finish_and_phases_of_an_attached_sequence():
    worker = DecodeWorker()
    worker.attach(make_job("a", [1, 2, 3], 4))
    worker.now_s = 2.0
    outputs = worker.run()
    assert [out.position for out in outputs] == [1, 2, 3]
    assert [out.finish for out in outputs] == [None, None, FinishReason.LENGTH]
    assert [out.cached_tokens for out in outputs] == [None, None, None]
    (queue,) = outputs[0].phases
    assert (queue.name, queue.duration_s, queue.ended_ago_s) == ("decode.queue", 2.0, 1.0)
    assert outputs[1].phases == ()
    (decode,) = outputs[2].phases
    assert (decode.name, decode.duration_s, decode.ended_ago_s) == ("decode", 3.0, 0.0)


def test_positions_cached_tokens_and_phases_of_a_local_sequence():
    worker = DecodeWorker(chunk=8)
    prompt = [1] * 16
    worker.add_local(make_job("warm-up", prompt, 1))
    worker.run()
    worker.add_local(make_job("a", prompt, 2))
    worker.now_s += 3.0
    first, last = worker.run()
    assert (first.position, first.cached_tokens) == (0, 12)
    assert (last.position, last.cached_tokens) == (1, None)
    assert [(phase.name, phase.ended_ago_s, phase.duration_s) for phase in first.phases] == [
        ("prefill.queue", 1.0, 3.0),
        ("prefill.compute", 0.0, 1.0),
    ]
    assert [(phase.name, phase.duration_s) for phase in last.phases] == [("decode", 1.0)]


def test_decode_rows_come_first_and_never_wait_for_a_long_local_prefill():
    worker = DecodeWorker(chunk=4)
    worker.attach(make_job("running", [1], 9))
    worker.step()
    worker.add_local(make_job("long", [2] * 20, 2))
    for _ in range(4):
        outputs = worker.step()
        assert [out.key.request for out in outputs] == ["running"]
        assert worker.model.sizes[-1] == 5


def test_local_prefills_share_the_chunk_budget_in_order():
    worker = DecodeWorker(chunk=8)
    worker.add_local(make_job("long", [1] * 12, 1))
    worker.add_local(make_job("short", [2] * 3, 1))
    outputs = worker.run()
    assert worker.model.sizes == [8, 7]
    assert [out.key.request for out in outputs] == ["long", "short"]


def test_eos_stops_unless_ignored_or_too_early():
    prompt = next(
        [left, right]
        for left in range(5)
        for right in range(5)
        if EOS in oracle(make_job("x", [left, right], 6))[1:4]
    )
    worker = DecodeWorker()
    jobs = [
        make_job("stop", prompt, 6, eos=True),
        make_job("ignored", prompt, 6),
        make_job("early", prompt, 6, eos=True, min_tokens=6),
    ]
    for job in jobs:
        worker.add_local(job)
    outputs = worker.run()
    tokens = tokens_of(outputs)
    for job in jobs:
        assert tokens[job.key.request] == oracle(job)
    finish = {out.key.request: out.finish for out in outputs if out.finish}
    assert tokens["stop"][-1] == EOS
    assert len(tokens["stop"]) < len(tokens["ignored"])
    assert finish["stop"] is FinishReason.STOP
    assert finish["early"] is FinishReason.LENGTH


def test_generated_blocks_are_reused_by_the_next_turn():
    worker = DecodeWorker()
    first = make_job("first", [1, 2, 3], 10)
    worker.attach(first)
    worker.run()
    history = [1, 2, 3, *oracle(first)]
    worker.add_local(make_job("second", [*history, 4], 1))
    (out,) = worker.run()
    # 3 + 10 tokens, of which the last one's KV was never written: three full blocks.
    assert out.cached_tokens == 12
    assert [out.token_id] == oracle(make_job("x", [*history, 4], 1))


def test_a_block_is_not_findable_before_its_last_token_is_written():
    worker = DecodeWorker()
    worker.attach(make_job("a", [1, 2, 3], 5))  # token 1 fills the block, KV comes with the step
    assert worker.ledger.counts().cached == 0
    assert not worker.ledger._prefix._rows
    worker.step()
    assert len(worker.ledger._prefix._rows) == 1


def test_delivered_output_counts_as_output_on_both_ways():
    whole = make_job("whole", [1, 2, 3, 4, 0], 12)
    output = oracle(whole)
    worker = DecodeWorker()
    for name in ("local", "remote"):
        forced = make_job(name, [1, 2, 3, 4, 0], 12, forced=output[:5])
        (worker.add_local if name == "local" else worker.attach)(forced)
    outputs = worker.run()
    tokens = tokens_of(outputs)
    assert tokens == {"local": output[5:], "remote": output[6:]}
    assert min(out.position for out in outputs if out.key.request == "local") == 5


def test_the_ticket_is_used_before_unpromised_room():
    worker = DecodeWorker(blocks=8)
    worker.attach(make_job("a", [1, 2, 3, 4], 29), headroom=8)
    assert worker.ledger.promised(key_of("a")) == 2
    for _ in range(4):
        worker.step()
    assert worker.ledger.promised(key_of("a")) == 1
    assert worker.ledger.room() == 5
    while worker.ledger.promised(key_of("a")):
        worker.step()
    while worker.ledger.counts().live < 4:
        worker.step()
    assert worker.ledger.room() == 4
    worker.run()
    assert_quiet(worker)


def test_the_ticket_ends_with_the_sequence():
    worker = DecodeWorker()
    worker.attach(make_job("a", [1, 2, 3], 2), headroom=100)
    worker.run()
    assert_quiet(worker)


def test_a_ticket_covers_prompt_and_headroom_but_no_more_than_the_job():
    assert ticket_blocks(10, 100, 4) == 5  # 10 + 8 tokens
    assert ticket_blocks(10, 100, 4, headroom_tokens=2) == 3
    assert ticket_blocks(10, 3, 4) == 3
    assert ticket_blocks(12, 1, 4) == 3  # the only output needs no KV
    assert can_ever_fit(make_job("a", [1] * 10, 7), 4, 4)
    assert not can_ever_fit(make_job("a", [1] * 10, 8), 4, 4)


def test_max_running_bounds_a_step_and_nobody_starves():
    worker = DecodeWorker(max_running=2)
    jobs = [make_job(f"job{at}", [at, 1], 3) for at in range(5)]
    for job in jobs:
        worker.attach(job)
    outputs = []
    while not worker.scheduler.is_idle:
        outputs.extend(worker.step())
        assert worker.model.sizes[-1] <= 2
    assert [out.key.request for out in outputs if out.finish] == [job.key.request for job in jobs]


def test_attaching_what_has_ended_already_only_frees():
    worker = DecodeWorker()
    worker.attach(make_job("a", [1, 2, 3], 1))
    assert worker.scheduler.schedule(0.0) is None
    assert_quiet(worker)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "in step", "preempted"])
def test_cancel_frees_once_in_every_state(state):
    worker = DecodeWorker(blocks=6, chunk=4, max_running=2)
    worker.attach(make_job("other", [1, 2, 3, 4], 13), headroom=0)
    worker.step()
    if state in {"decoding", "preempted"}:
        worker.attach(make_job("a", [2, 2, 3, 4], 17), headroom=0)
    else:
        worker.add_local(make_job("a", [2] * 9, 2))
    batch = None
    if state == "prefilling" or state == "decoding":
        worker.step()
    elif state == "in step":
        batch = worker.scheduler.schedule(worker.now_s)
        assert len(batch.slices) == 2
    elif state == "preempted":
        while not worker.scheduler.num_preemptions:
            worker.step()
    assert worker.scheduler.cancel(key_of("a"))
    assert not worker.scheduler.cancel(key_of("a"))
    if batch is not None:
        outputs = worker.finish(batch)
        assert [out.key.request for out in outputs] == ["other"]
    assert {out.key.request for out in worker.run()} == {"other"}
    assert_quiet(worker)


def test_tokens_still_to_prefill_are_counted():
    worker = DecodeWorker(chunk=4)
    worker.attach(make_job("a", [1], 9))
    worker.add_local(make_job("b", [2] * 9, 2))
    assert worker.scheduler.waiting_tokens == 9
    worker.step()
    assert worker.scheduler.waiting_tokens == 5
    worker.run()
    assert worker.scheduler.waiting_tokens == 0


def test_what_can_never_fit_or_is_known_is_refused():
    worker = DecodeWorker(blocks=2)
    with pytest.raises(ContextLengthError, match="KV blocks"):
        worker.scheduler.add_local(make_job("big", [1] * 5, 5), 0.0)
    worker.scheduler.add_local(make_job("a", [1], 5), 0.0)
    with pytest.raises(LedgerError, match="scheduled already"):
        worker.scheduler.add_local(make_job("a", [1], 5), 0.0)
    blocks = worker.ledger.allocate(1)
    with pytest.raises(LedgerError, match="needs 2 blocks"):
        worker.scheduler.attach(make_job("b", [1] * 5, 2), blocks, 0, 0.0)
    assert BLOCK == 4
