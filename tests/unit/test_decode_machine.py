"""The decode scheduler under random tickets, transfers, cancels and steps in a tiny pool."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.kv.tickets import can_ever_fit
from tests.support.chain_model import make_job, oracle
from tests.support.decode_worker import BLOCK, DecodeWorker

_BLOCKS = 6
_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class DecodeMachine(RuleBasedStateMachine):
    """Every job ends with exactly its oracle's tokens, or is cancelled and frees all it held."""

    def __init__(self):
        super().__init__()
        self.worker = DecodeWorker(blocks=_BLOCKS, chunk=5, max_running=3)
        self.names = 0
        self.reserved = {}  # jobs with a ticket only
        self.loading = {}  # key -> (job, held, fresh)
        self.jobs = {}  # inside the scheduler
        self.output = {}  # key -> tokens so far, forced and first ones included
        self.batch = None

    # ---- tickets and transfers ------------------------------------------------------------------

    @rule(
        prompt=_TOKENS,
        max_tokens=st.integers(1, 16),
        num_forced=st.integers(0, 3),
        eos=st.booleans(),
        headroom=st.sampled_from([0, 0, 1, None]),
        then=st.sampled_from(["reserve", "attach", "attach", "local", "no ticket"]),
    )
    def submit(self, prompt, max_tokens, num_forced, eos, headroom, then):
        if self.worker.scheduler.has_preempted:
            return
        self.names += 1
        job = make_job(f"job{self.names}", prompt, max_tokens, eos=eos)
        forced = oracle(job)[:num_forced]
        if len(forced) == len(oracle(job)):
            forced = forced[:-1]
        job = make_job(f"job{self.names}", prompt, max_tokens, eos=eos, forced=forced)
        if not can_ever_fit(job, _BLOCKS, BLOCK):
            return
        if then == "no ticket":
            self._add_local(job)
            return
        if not self.worker.reserve(job, headroom):
            return
        if then == "reserve":
            self.reserved[job.key] = job
        elif then == "local":
            self._add_local(job)
        else:
            self._arrive(job, *self.worker.accept(job))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def add_local(self, data):
        self._add_local(self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved)))))

    def _add_local(self, job):
        self.worker.scheduler.add_local(job, self.worker.now_s)
        self.jobs[job.key] = job
        self.output[job.key] = list(job.forced_token_ids)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def accept(self, data):
        job = self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved))))
        self.loading[job.key] = (job, *self.worker.accept(job))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def arrive(self, data):
        self._arrive(*self.loading.pop(data.draw(st.sampled_from(sorted(self.loading)))))

    def _arrive(self, job, held, fresh):
        self.worker.arrive(job, held, fresh)
        if len(oracle(job)) > 1:
            self.jobs[job.key] = job
            self.output[job.key] = [*job.forced_token_ids, oracle(job)[0]]

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def abort(self, data):
        job, held, _ = self.loading.pop(data.draw(st.sampled_from(sorted(self.loading))))
        self.worker.ledger.abort_loading(job.key)
        self.worker.ledger.release(held)
        self.worker.ledger.forget(job.key)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def expire(self, data):
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[key]
        self.worker.ledger.forget(key)

    # ---- the scheduler --------------------------------------------------------------------------

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.jobs)))
        assert self.worker.scheduler.cancel(key)
        assert not self.worker.scheduler.cancel(key)
        del self.jobs[key]

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self):
        self.batch = self.worker.scheduler.schedule(self.worker.now_s)
        if self.batch is None and not self.worker.scheduler.is_idle:
            assert self.reserved or self.loading, "nothing runs though all room is here"
            assert self.worker.scheduler.has_preempted

    @precondition(lambda self: self.batch is not None)
    @rule()
    def complete(self):
        batch, self.batch = self.batch, None
        for out in self.worker.finish(batch):
            job, output = self.jobs[out.key], self.output[out.key]
            assert out.position == len(output)
            output.append(out.token_id)
            if out.finish is not None:
                assert output == [*job.forced_token_ids, *oracle(job)]
                assert out.phases[-1].name == "decode"
                del self.jobs[out.key]

    @rule(count=st.integers(2, 8))
    def several_steps(self, count):
        for _ in range(count):
            if self.batch is None:
                self.schedule()
            if self.batch is None:
                return
            self.complete()

    @invariant()
    def integrity(self):
        self.worker.check()

    def teardown(self):
        while self.loading:
            _, (job, held, _fresh) = self.loading.popitem()
            self.worker.ledger.abort_loading(job.key)
            self.worker.ledger.release(held)
            self.worker.ledger.forget(job.key)
        while self.reserved:
            self.worker.ledger.forget(self.reserved.popitem()[0])
        for _ in range(2000):
            if self.worker.scheduler.is_idle:
                break
            self.several_steps(1)
        if self.batch is not None:
            self.complete()
        assert not self.jobs, "a job never ended"
        counts = self.worker.ledger.counts()
        assert counts.free + counts.cached == counts.total
        assert counts.promised == 0


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
