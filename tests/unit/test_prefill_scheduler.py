"""The prefill scheduler: order, chunks, prefix hits, waiting for a fuller step, cancel."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import ContextLengthError, LedgerError
from cluster.kv.allocator import BlockLedger
from cluster.types import AttemptKey, FinishReason, RequestId
from prefill.scheduler import PrefillScheduler, Progress, PromptDone
from tests.support.chain_model import EOS, ChainModel, make_job, oracle, seed_for

_BLOCK = 4


class _Worker:
    """A scheduler, its ledger and a model, stepped by hand; time is a plain number."""

    def __init__(self, *, blocks=32, chunk=8, max_running=4, max_wait_s=0.0, prefix_cache=True):
        self.ledger = BlockLedger(blocks, _BLOCK, prefix_cache=prefix_cache)
        self.scheduler = PrefillScheduler(
            self.ledger,
            block_size=_BLOCK,
            chunk_tokens=chunk,
            max_running=max_running,
            max_wait_s=max_wait_s,
            seed_for=seed_for,
        )
        self.model = ChainModel(self.ledger)
        self.now_s = 0.0

    def step(self):
        plan = self.scheduler.schedule(self.now_s)
        if plan.batch is None:
            return plan, ()
        self.now_s += 1.0
        return plan, self.scheduler.complete(plan.batch, self.model.run(plan.batch), self.now_s)

    def run(self, *jobs):
        """Add jobs, step until idle, return every event in order."""
        for job in jobs:
            self.scheduler.add(job, self.now_s)
        events = []
        while not self.scheduler.is_idle:
            plan, outputs = self.step()
            assert plan.batch is not None
            events.extend(outputs)
            self.check()
        return events

    def check(self):
        self.ledger.check_integrity()
        self.scheduler.check_integrity()


def _done(events):
    return {event.key.request: event for event in events if isinstance(event, PromptDone)}


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 23, 40])
def test_every_length_cold_and_warm_gives_the_same_token(num_tokens):
    worker = _Worker(chunk=8)
    prompt = [at % 5 for at in range(num_tokens)]
    for name in ("cold", "warm", "again"):
        job = make_job(name, prompt, 4)
        done = _done(worker.run(job))[name]
        assert [done.token_id] == oracle(job, num_tokens=1)
        hit = 0 if name == "cold" else (num_tokens - 1) // _BLOCK * _BLOCK
        assert done.cached_tokens == hit
    counts = worker.ledger.counts()
    assert counts.live == 0
    assert counts.free + counts.cached == counts.total


def test_long_prompts_are_chunked_and_report_progress():
    worker = _Worker(chunk=8)
    events = worker.run(make_job("long", [1] * 20, 4))
    assert [type(event) for event in events] == [Progress, Progress, PromptDone]
    assert [event.computed_tokens for event in events[:2]] == [8, 16]
    assert worker.model.sizes == [8, 8, 4]


def test_a_short_prompt_shares_the_last_step_of_a_long_one():
    worker = _Worker(chunk=8)
    jobs = [make_job("long", [1] * 12, 4), make_job("short", [2] * 6, 4)]
    events = worker.run(*jobs)
    assert worker.model.sizes == [8, 8, 2]  # 4 of the long one and 4 of the short one
    done = _done(events)
    assert list(done) == ["long", "short"]
    for job in jobs:
        assert [done[job.key.request].token_id] == oracle(job, num_tokens=1)


def test_prompts_start_in_order_of_arrival_even_when_a_later_one_would_fit():
    worker = _Worker(blocks=4, chunk=8)
    worker.scheduler.add(make_job("first", [1] * 12, 4), 0.0)
    worker.step()
    worker.scheduler.add(make_job("big", [2] * 16, 4), 0.0)
    worker.scheduler.add(make_job("small", [3] * 2, 4), 0.0)
    plan, _ = worker.step()
    assert plan.started == ()
    assert worker.scheduler.num_waiting == 2
    assert list(_done(worker.run())) == ["big", "small"]


def test_blocks_held_by_a_handoff_keep_the_next_prompt_waiting():
    worker = _Worker(blocks=4)
    worker.scheduler.add(make_job("a", [1] * 8, 4), 0.0)
    plan = worker.scheduler.schedule(0.0)
    held = plan.started[0].block_ids
    worker.ledger.share(held)
    worker.scheduler.complete(plan.batch, worker.model.run(plan.batch), 1.0)
    worker.scheduler.add(make_job("b", [2] * 12, 4), 1.0)
    plan, _ = worker.step()
    assert (plan.batch, plan.wake_at_s) == (None, None)
    worker.ledger.release(held)
    assert list(_done(worker.run())) == ["b"]


def test_references_taken_at_start_outlive_the_prompt():
    worker = _Worker(blocks=4)
    worker.scheduler.add(make_job("a", [1] * 6, 4), 0.0)
    plan = worker.scheduler.schedule(0.0)
    (started,) = plan.started
    worker.ledger.share(started.block_ids)
    worker.scheduler.complete(plan.batch, worker.model.run(plan.batch), 1.0)
    assert worker.ledger.counts().live == 2
    assert len(worker.model.read(started.block_ids, 6)) == 6
    worker.ledger.release(started.block_ids)
    assert worker.ledger.counts().live == 0


def test_queue_and_compute_seconds():
    worker = _Worker(chunk=4)
    events = worker.run(make_job("a", [1] * 8, 4), make_job("b", [2] * 8, 4))
    done = _done(events)
    assert (done["a"].queue_s, done["a"].compute_s) == (0.0, 2.0)
    assert (done["b"].queue_s, done["b"].compute_s) == (2.0, 2.0)


def test_the_first_token_can_be_the_last():
    prompt = next(
        [at % 5, at // 5]
        for at in range(25)
        if oracle(make_job("x", [at % 5, at // 5], 9), num_tokens=1) == [EOS]
    )
    worker = _Worker()
    done = _done(
        worker.run(
            make_job("length", [1, 2, 3], 1),
            make_job("stop", prompt, 9, eos=True),
            make_job("more", prompt, 9),
            make_job("masked", prompt, 9, eos=True, min_tokens=3),
        )
    )
    assert done["length"].finish is FinishReason.LENGTH
    assert done["stop"].finish is FinishReason.STOP
    assert done["more"].finish is None
    assert done["masked"].finish is None


def test_delivered_output_is_computed_like_prompt_and_counts_as_output():
    worker = _Worker()
    whole = make_job("whole", [1, 2, 3, 4, 0], 8)
    output = oracle(whole)
    retried = make_job("retried", [1, 2, 3, 4, 0], 8, forced=output[:7])
    done = _done(worker.run(retried))["retried"]
    assert done.token_id == output[7]
    assert done.finish is FinishReason.LENGTH


def test_tenants_do_not_share_blocks():
    worker = _Worker()
    worker.run(make_job("a", [1] * 9, 4, salt="one"))
    done = _done(worker.run(make_job("b", [1] * 9, 4, salt="two")))
    assert done["b"].cached_tokens == 0
    done = _done(worker.run(make_job("c", [1] * 9, 4, salt="one")))
    assert done["c"].cached_tokens == 8


def test_without_prefix_cache_nothing_is_reused():
    worker = _Worker(prefix_cache=False)
    for name in ("a", "b"):
        assert _done(worker.run(make_job(name, [1] * 9, 4)))[name].cached_tokens == 0
    assert worker.ledger.counts().free == 32


def test_a_step_waits_to_fill_but_no_longer_than_allowed():
    worker = _Worker(chunk=8, max_wait_s=5.0)
    worker.scheduler.add(make_job("a", [1] * 3, 4), 0.0)
    plan, _ = worker.step()
    assert (plan.batch, plan.wake_at_s) == (None, 5.0)
    worker.now_s = 4.0
    worker.scheduler.add(make_job("b", [2] * 3, 4), 4.0)
    plan, _ = worker.step()
    assert (plan.batch, plan.wake_at_s) == (None, 5.0)
    worker.now_s = 5.0
    plan, outputs = worker.step()
    assert list(_done(outputs)) == ["a", "b"]


def test_a_full_step_does_not_wait():
    worker = _Worker(chunk=8, max_wait_s=5.0)
    worker.scheduler.add(make_job("a", [1] * 3, 4), 0.0)
    worker.scheduler.add(make_job("b", [2] * 5, 4), 0.0)
    _, outputs = worker.step()
    assert list(_done(outputs)) == ["a", "b"]


def test_a_prompt_under_way_does_not_wait_for_its_last_chunk():
    worker = _Worker(chunk=8, max_wait_s=5.0)
    worker.scheduler.add(make_job("a", [1] * 9, 4), 0.0)
    worker.step()
    worker.scheduler.add(make_job("b", [2] * 3, 4), worker.now_s)
    _, outputs = worker.step()
    assert list(_done(outputs)) == ["a", "b"]


def test_what_can_never_fit_or_is_known_is_refused():
    worker = _Worker(blocks=2)
    with pytest.raises(ContextLengthError, match="3 KV blocks"):
        worker.scheduler.add(make_job("big", [1] * 9, 4), 0.0)
    worker.scheduler.add(make_job("a", [1] * 8, 4), 0.0)
    with pytest.raises(LedgerError, match="scheduled already"):
        worker.scheduler.add(make_job("a", [1] * 8, 4), 0.0)


def test_cancel_frees_once_in_every_state():
    worker = _Worker(blocks=8, chunk=4)
    for name in ("running", "waiting"):
        worker.scheduler.add(make_job(name, [1] * 12, 4), 0.0)
    worker.step()
    assert worker.scheduler.waiting_tokens == 20
    plan = worker.scheduler.schedule(worker.now_s)
    for name in ("running", "waiting"):
        assert worker.scheduler.cancel(AttemptKey(RequestId(name), 1))
        assert not worker.scheduler.cancel(AttemptKey(RequestId(name), 1))
    assert worker.ledger.counts().live == 3  # the step still names them
    assert worker.scheduler.complete(plan.batch, worker.model.run(plan.batch), 2.0) == ()
    assert worker.scheduler.is_idle
    worker.check()
    counts = worker.ledger.counts()
    assert counts.free + counts.cached == counts.total


_PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18)


class PrefillMachine(RuleBasedStateMachine):
    """Random jobs, cancels at any moment, and handoffs that let go late."""

    def __init__(self):
        super().__init__()
        self.worker = _Worker(blocks=8, chunk=5, max_running=3, max_wait_s=2.0)
        self.jobs = {}
        self.plan = None
        self.handoffs = []
        self.names = 0

    @rule(prompt=_PROMPTS, forced=st.lists(st.integers(0, 1), max_size=3))
    def add(self, prompt, forced):
        self.names += 1
        job = make_job(f"job{self.names}", prompt, 9, forced=forced)
        self.worker.scheduler.add(job, self.worker.now_s)
        self.jobs[job.key] = job

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.jobs)))
        assert self.worker.scheduler.cancel(key)
        assert not self.worker.scheduler.cancel(key)
        del self.jobs[key]

    @precondition(lambda self: self.plan is None)
    @rule(hand_off=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 3.0]))
    def schedule(self, hand_off, seconds):
        self.worker.now_s += seconds
        plan = self.worker.scheduler.schedule(self.worker.now_s)
        for started in plan.started:
            if hand_off:
                self.worker.ledger.share(started.block_ids)
                self.handoffs.append(started.block_ids)
        if plan.batch is not None:
            assert plan.batch.num_tokens <= 5
            self.plan = plan

    @precondition(lambda self: self.plan is not None)
    @rule()
    def complete(self):
        batch, self.plan = self.plan.batch, None
        events = self.worker.scheduler.complete(
            batch, self.worker.model.run(batch), self.worker.now_s
        )
        for event in events:
            job = self.jobs[event.key]
            if isinstance(event, PromptDone):
                assert [event.token_id] == oracle(job, num_tokens=1)
                assert event.cached_tokens < len(job.prompt_token_ids)
                del self.jobs[event.key]

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def handed_off(self, data):
        index = data.draw(st.integers(0, len(self.handoffs) - 1))
        self.worker.ledger.release(self.handoffs.pop(index))

    @invariant()
    def integrity(self):
        self.worker.check()

    def teardown(self):
        if self.plan is not None:
            self.complete()
        while self.handoffs:
            self.worker.ledger.release(self.handoffs.pop())
        for _ in range(1000):
            if self.worker.scheduler.is_idle:
                break
            self.schedule(hand_off=False, seconds=3.0)
            assert self.plan is not None
            self.complete()
        assert not self.jobs
        counts = self.worker.ledger.counts()
        assert counts.free + counts.cached == counts.total


TestPrefillMachine = PrefillMachine.TestCase
TestPrefillMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
