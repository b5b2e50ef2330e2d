"""One choice between its two workers: who may end it, and what it still owes them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.clock import monotonic_s
from cluster.errors import HandoffError, NoDecodeWorkersError
from cluster.types import (
    AttemptKey,
    FinishReason,
    GenerationJob,
    Incarnation,
    RequestId,
    Role,
    SamplingParams,
    TokenDelta,
    WorkerAddress,
    WorkerId,
)
from cluster.wire.messages import Accepted, Cancel, Reserve, Reserved
from router.choice import Choice
from router.line import WaitingLine
from router.policy import Candidate, Decision, RouteRequest
from router.records import RequestRecord
from router.sessions import Peer

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
KEY = AttemptKey(RequestId("r"), 1)


class Session:
    """Takes every job."""

    async def call(self, body: Any, *, timeout_s: float) -> Any:
        if isinstance(body, Reserve):
            return Reserved(body.job.key, 1)
        return Accepted(body.job.key)


def make_peer(worker: WorkerId, role: Role) -> Peer:
    address = WorkerAddress(worker, role, Incarnation("life"), "127.0.0.1:1", 1)
    session: Any = Session()
    return Peer(address, session)


class Host:
    """The flow around one choice, and the sessions: one pair of workers that take everything."""

    def __init__(self) -> None:
        self.sessions: Any = self
        self.line = WaitingLine(max_waiting=1, timeout_s=10)
        self.policy: Any = SimpleNamespace(choose=lambda _view, _request: DECISION)
        self.peers = {
            PREFILL: make_peer(PREFILL, Role.PREFILL),
            DECODE: make_peer(DECODE, Role.DECODE),
        }
        self.sent: list[tuple[WorkerId, Any]] = []
        self.is_new = False

    def view(self) -> Any:
        return None

    def register(self, choice: Choice) -> None:
        pass

    def unregister(self, choice: Choice) -> None:
        pass

    def alive(self, role: Role) -> tuple[Peer, ...]:
        return tuple(p for p in self.peers.values() if p.address.role is role)

    def expects(self, role: Role) -> bool:
        return self.is_new

    def find(self, worker: WorkerId) -> Peer:
        return self.peers[worker]

    def send(self, peer: Peer, body: Any) -> bool:
        self.sent.append((peer.address.worker, body))
        return True


DECISION = Decision(
    "test", "split", PREFILL, DECODE, False, (Candidate(PREFILL, DECODE, None, None, 0, 0.0, None),)
)


def make_choice(host: Host) -> Choice:
    """A choice that nobody runs yet."""
    job = GenerationJob(KEY, (1, 2, 3), SamplingParams(max_tokens=3))
    record = RequestRecord("r", "t", "default", monotonic_s(), 3)
    return Choice(
        host,
        job,
        0,
        RouteRequest(3, 3),
        record,
        deadline_s=monotonic_s() + 30,
        on_delta=lambda _choice, _delta: None,
    )


async def turns() -> None:
    """Nothing a choice awaits here takes longer than a turn of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def running_choice(host: Host) -> tuple[Choice, asyncio.Task[None]]:
    """A choice whose prompt is with the prefill worker."""
    choice = make_choice(host)
    task = asyncio.create_task(choice.run())
    await turns()
    assert choice.stage == "prefill"
    return choice, task


async def test_a_prefill_worker_that_dies_after_its_commit_costs_nothing():
    host = Host()
    choice, task = await running_choice(host)
    choice.accept(PREFILL, TokenDelta(KEY, 0, (7,)), monotonic_s())
    choice.worker_lost(host.peers[PREFILL], "killed")  # before decode's first word is here
    choice.accept(DECODE, TokenDelta(KEY, 0, (7,)), monotonic_s())
    choice.accept(DECODE, TokenDelta(KEY, 1, (8, 9), FinishReason.LENGTH), monotonic_s())
    await asyncio.wait_for(task, 5)
    assert choice.journal.token_ids == [7, 8, 9]
    assert host.sent == []


@pytest.mark.parametrize("has_token_one", [False, True])
async def test_a_prefill_worker_that_dies_before_its_commit_ends_the_choice(has_token_one: bool):
    host = Host()
    choice, task = await running_choice(host)
    if has_token_one:
        choice.accept(PREFILL, TokenDelta(KEY, 0, (7,)), monotonic_s())
    choice.worker_lost(host.peers[PREFILL], "killed")
    with pytest.raises(HandoffError, match="killed"):
        await asyncio.wait_for(task, 10)
    assert (DECODE, Cancel(KEY)) in host.sent


async def test_a_new_ingress_waits_for_its_sessions_before_it_says_no():
    host = Host()
    decode = host.peers.pop(DECODE)
    with pytest.raises(NoDecodeWorkersError):
        await make_choice(host).run()
    host.is_new = True
    choice = make_choice(host)
    task = asyncio.create_task(choice.run())
    await turns()
    assert choice.stage == "queue"
    assert not task.done()
    host.peers[DECODE] = decode
    host.line.notify()
    await turns()
    assert choice.stage == "prefill"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
