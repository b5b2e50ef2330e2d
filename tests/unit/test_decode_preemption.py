"""The decode scheduler when blocks run out: who gives way, who waits, and that all end well."""

from __future__ import annotations

from tests.support.chain_model import make_job, oracle
from tests.support.decode_worker import DecodeWorker, assert_quiet, key_of, tokens_of


def test_when_blocks_run_out_the_youngest_gives_way_and_nothing_repeats():
    worker = DecodeWorker(blocks=8)
    jobs = [make_job(name, [at, 1, 2, 3], 17) for at, name in enumerate("abc")]
    for job in jobs:
        worker.attach(job, headroom=0)
    steps = []
    while not worker.scheduler.is_idle:
        steps.append(worker.step())
    outputs = [out for step in steps for out in step]
    assert worker.scheduler.num_preemptions > 0
    assert all("a" in {out.key.request for out in step} for step in steps[:16])  # the oldest
    assert [out.key.request for out in outputs if out.finish] == ["a", "b", "c"]
    assert tokens_of(outputs) == {job.key.request: oracle(job)[1:] for job in jobs}
    assert_quiet(worker)


def test_no_new_tickets_while_a_preempted_sequence_waits():
    worker = DecodeWorker(blocks=4)
    for name in "ab":
        worker.attach(make_job(name, [1, 2, 3, 4, 5], 8), headroom=0)
    assert not worker.scheduler.has_preempted
    while not worker.scheduler.num_preemptions:
        worker.step()
    assert worker.scheduler.has_preempted
    assert (worker.scheduler.num_running, worker.scheduler.num_waiting) == (1, 1)
    worker.run()
    assert not worker.scheduler.has_preempted
    assert_quiet(worker)


def test_a_preempted_sequence_comes_back_before_newer_ones():
    worker = DecodeWorker(blocks=6)
    for name in "ab":
        worker.attach(make_job(name, [1, 2, 3, 4, 5], 14), headroom=0)
    while not worker.scheduler.num_preemptions:
        worker.step()
    worker.scheduler.add_local(make_job("late", [3] * 4, 1), worker.now_s)  # without a ticket
    batches = []
    while not worker.scheduler.is_idle:
        batch = worker.scheduler.schedule(worker.now_s)
        batches.append([piece.key.request for piece in batch.slices])
        worker.finish(batch)
    resumed = next(at for at, names in enumerate(batches) if "b" in names)
    assert all("late" not in names for names in batches[:resumed])
    assert_quiet(worker)


def test_a_job_that_must_wait_for_all_blocks_gets_them():
    worker = DecodeWorker(blocks=4)
    worker.attach(make_job("a", [1] * 5, 9), headroom=0)
    worker.scheduler.add_local(make_job("big", [2] * 15, 2), worker.now_s)
    outputs = worker.run()
    assert [out.key.request for out in outputs if out.finish] == ["a", "big"]
    assert_quiet(worker)


def test_the_last_sequence_waits_while_all_room_is_promised_elsewhere():
    worker = DecodeWorker(blocks=2)
    worker.attach(make_job("a", [1, 2, 3], 4), headroom=0)
    assert worker.ledger.promise(key_of("other"), 1)
    worker.step()
    assert worker.scheduler.schedule(worker.now_s) is None
    assert worker.scheduler.has_preempted  # it lacks room: give no new tickets
    assert worker.scheduler.num_preemptions == 0
    worker.ledger.forget(key_of("other"))
    assert len(worker.run()) == 2
    assert not worker.scheduler.has_preempted


def test_a_waiting_attached_sequence_can_be_preempted_for_an_older_one():
    worker = DecodeWorker(blocks=4, max_running=1)
    old, young = make_job("old", [1, 2, 3], 10), make_job("young", [2, 2, 3, 4, 5], 3)
    worker.attach(old, headroom=0)
    worker.attach(young, headroom=0)
    outputs = worker.run()
    assert worker.scheduler.num_preemptions == 1
    assert tokens_of(outputs) == {"old": oracle(old)[1:], "young": oracle(young)[1:]}
    (queue,) = next(out for out in outputs if out.key.request == "young").phases
    assert queue.name == "decode.queue"
    assert_quiet(worker)


def test_a_preempted_sequence_gives_its_ticket_back_too():
    worker = DecodeWorker(blocks=5)
    worker.attach(make_job("old", [1, 2, 3, 4], 14), headroom=0)
    worker.attach(make_job("young", [2, 2, 3], 14), headroom=8)  # one block and two promised
    for _ in range(6):
        worker.step()
    assert worker.scheduler.num_preemptions == 1
    assert worker.ledger.counts().promised == 0
    ends = [out.key.request for out in worker.run() if out.finish]
    assert ends == ["old", "young"]
    assert_quiet(worker)


def test_a_waiting_local_job_gives_way_by_its_ticket():
    worker = DecodeWorker(blocks=4, max_running=1)
    old, waiting = make_job("old", [1, 2, 3], 13), make_job("waiting", [2] * 5, 2)
    worker.attach(old, headroom=0)
    worker.add_local(waiting)
    outputs = worker.run()
    assert worker.scheduler.num_preemptions == 0  # nothing was computed in vain
    assert tokens_of(outputs) == {"old": oracle(old)[1:], "waiting": oracle(waiting)}
    assert_quiet(worker)


def test_a_ticket_is_used_even_while_a_preempted_sequence_waits_for_room():
    worker = DecodeWorker(blocks=6)
    worker.attach(make_job("a", [1, 2, 3], 14), headroom=0)
    worker.attach(make_job("b", [2, 2, 3], 14), headroom=0)
    local = make_job("local", [3] * 9, 1)
    assert worker.reserve(local)
    while not worker.scheduler.num_preemptions:
        worker.step()
    worker.scheduler.cancel(key_of("a"))
    assert worker.ledger.promised(local.key) == 3
    worker.scheduler.add_local(make_job("small", [3], 1), worker.now_s)  # without a ticket
    worker.scheduler.add_local(local, worker.now_s)
    # "b" does not fit beside the promise, so the promise has to be used up first.
    blocker = worker.ledger.allocate(2)
    batch = worker.scheduler.schedule(worker.now_s)
    assert [piece.key.request for piece in batch.slices] == ["local"]
    worker.finish(batch)
    worker.ledger.release(blocker)
    assert [out.key.request for out in worker.run() if out.finish] == ["local", "small", "b"]
    assert_quiet(worker)


def test_a_sequence_resumes_only_when_the_running_ones_can_grow_too():
    worker = DecodeWorker(blocks=8)
    for at, name in enumerate("abc"):
        worker.attach(make_job(name, [at, 1, 2], 21), headroom=0)
    worker.run()
    # Each of the two younger ones is preempted once or twice, not once a step.
    assert 2 <= worker.scheduler.num_preemptions <= 4


def test_one_that_gives_way_to_an_older_one_lets_it_run_in_the_same_step():
    worker = DecodeWorker(blocks=5, max_running=1)
    worker.attach(make_job("oldest", [1, 2, 3], 8), headroom=0)
    worker.add_local(make_job("older", [2] * 5, 2), headroom=0)
    worker.attach(make_job("young", [3, 2, 3], 12), headroom=0)
    outputs = worker.run()  # "young" gives way twice, the second time while it runs alone
    assert worker.scheduler.num_preemptions == 2
    assert [out.key.request for out in outputs if out.finish] == ["oldest", "older", "young"]
    assert_quiet(worker)


def test_a_ticket_that_does_not_suffice_is_no_obstacle_for_others():
    worker = DecodeWorker(blocks=4, max_running=1)
    old = make_job("old", [1] * 12, 2)
    assert worker.ledger.promise(old.key, 1)
    worker.scheduler.add_local(old, worker.now_s)
    worker.attach(make_job("young", [2, 2, 3], 14), headroom=4)
    outputs = worker.run()
    assert [out.key.request for out in outputs if out.finish] == ["young", "old"]
    assert_quiet(worker)
