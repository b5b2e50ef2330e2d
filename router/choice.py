"""One (prompt, choice) of a client request: placed on workers, followed to its end.

Owns the attempt's key, the journal and the duty to cancel: however a choice ends (finished, stop
string, disconnect, deadline, lost worker), whatever workers may still hold for it is cancelled
exactly then. It receives tokens through `accept` and never talks HTTP.

    who is asked to cancel     prefill                        decode
    before token 1             if submitted                   if reserved
    after token 1, unfinished  while decode has sent nothing  yes
    finished by prefill        no                             yes, its ticket is unused
    finished by decode         no                             no
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from cluster.clock import monotonic_s
from cluster.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineError,
    DiptychError,
    HandoffError,
    NoDecodeWorkersError,
    SessionClosedError,
    WorkerLostError,
)
from cluster.types import (
    AttemptKey,
    FinishReason,
    GenerationJob,
    Role,
    TokenDelta,
    WorkerAddress,
    WorkerId,
)
from cluster.wire.messages import (
    Accepted,
    Cancel,
    Failed,
    Message,
    Refused,
    Reserve,
    Reserved,
    SubmitLocal,
    SubmitPrefill,
)
from router.journal import ChoiceJournal
from router.records import AttemptRecord, RequestRecord, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.generation import ChoiceDelta
    from router.line import WaitingLine
    from router.policy import Decision, Policy, RouteRequest, RoutingView
    from router.sessions import Peer, WorkerSessions

ANSWER_TIMEOUT_S = 5.0  # reserve and submit are answered at once by a live worker
RECHECK_S = 1.0  # longest wait at the head of the line without news
MIN_RECHECK_S = 0.01
VERDICT_S = 1.0  # for decode to say what became of a handoff whose prefill worker is gone
MAX_DECODE_CANDIDATES = 3


class ChoiceHost(Protocol):
    """What a choice needs of the flow around it."""

    sessions: WorkerSessions
    line: WaitingLine
    policy: Policy

    def view(self) -> RoutingView:
        """What a policy may know, now."""

    def register(self, choice: Choice) -> None:
        """Tokens of `choice.key` go to it from now on; its charges count."""

    def unregister(self, choice: Choice) -> None:
        """Neither any more."""


class Choice:
    """The life of one internal request; `run` is its only task."""

    def __init__(
        self,
        host: ChoiceHost,
        job: GenerationJob,
        index: int,
        route: RouteRequest,
        record: RequestRecord,
        *,
        deadline_s: float,
        on_delta: Callable[[Choice, ChoiceDelta], None],
    ) -> None:
        """`deadline_s` is monotonic; `on_delta` is called with each run of new tokens."""
        self.index = index
        self.record = record
        self.prefill: WorkerId | None = None
        self.decode: WorkerId | None = None
        self._bound: dict[WorkerId, Peer] = {}  # the processes behind these ids
        self._stage: Stage = "queue"
        self.journal = ChoiceJournal(index, job.sampling.max_tokens)
        self._host = host
        self._job = job
        self._route = route
        self._deadline_s = deadline_s
        self._on_delta = on_delta
        self._over = asyncio.Event()
        self._error: DiptychError | None = None
        self._decode_spoke = False
        self._prefill_finished = False
        self._cached_tokens = 0  # this choice's part of the record's

    @property
    def key(self) -> AttemptKey:
        """The current attempt."""
        return self._job.key

    @property
    def stage(self) -> Stage:
        """Where a cancel would find this choice."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._stage = stage
        if self.index == 0:
            self.record.stage = stage

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended, once it has."""
        return self.journal.finish

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens this choice still has queued or in compute on its prefill worker."""
        return self._route.prompt_tokens if self.stage == "prefill" else 0

    async def run(self) -> None:
        """Place the choice and follow it to its end.

        Raises:
            DiptychError: why it did not finish; workers have been told to drop it.
        """
        try:
            async with asyncio.timeout(self._deadline_s - monotonic_s()):
                while not await self._place():
                    self._next_attempt()
                await self._over.wait()
        except TimeoutError:
            raise DeadlineError("the request's deadline passed") from None
        finally:
            self._withdraw()
            self._host.unregister(self)
        if self._error is not None:
            raise self._error

    # ---- what workers say -----------------------------------------------------------------------

    def accept(self, worker: WorkerId, delta: TokenDelta, arrived_s: float) -> None:
        """Take tokens of the current attempt; repeats and gaps are the journal's business."""
        if self._over.is_set():
            return
        for phase in delta.phases:
            self.record.place(phase, worker, arrived_s, delta.key.attempt)
        if delta.cached_tokens is not None and self._job.sampling.choice == 0:  # once a prompt
            self.record.cached_tokens += delta.cached_tokens - self._cached_tokens
            self._cached_tokens = delta.cached_tokens
        from_decode = worker == self.decode
        if from_decode:
            self._decode_spoke = True
            self.stage = "decode"
        elif self.stage == "prefill":
            self.stage = "handoff"
            self._host.line.notify()
        if delta.finish is not None:
            self._prefill_finished = not from_decode
        readable = self.journal.record(delta.position, delta.token_ids, delta.finish)
        if readable is None:
            return
        self._on_delta(self, readable)
        if readable.finish is not None:
            self._over.set()

    def stop(self, reason: FinishReason, num_tokens: int) -> None:
        """The text layer ended this choice at `num_tokens`: a stop string was found."""
        finished_by_worker = self.journal.finish is not None
        self.journal.stop(num_tokens, reason)
        if not finished_by_worker:
            self._over.set()
            self._withdraw(finished_by_worker=False)

    def failed(self, worker: WorkerId, failure: Failed) -> None:
        """A worker gave this attempt up; prefill's word counts only until decode has spoken."""
        if worker == self.prefill and self._decode_spoke:
            return
        error: DiptychError
        if failure.code == DeadlineError.code:
            error = DeadlineError(failure.message)
        elif failure.code == WorkerLostError.code:
            error = WorkerLostError(failure.message)
        else:
            error = HandoffError(failure.message)
        self._end(error)

    def uses(self, peer: Peer) -> bool:
        """Whether this attempt depends on that very process."""
        return any(bound is peer for bound in self._bound.values())

    def worker_lost(self, peer: Peer, reason: str) -> None:
        """A session ended; it matters only while this choice still needs that worker."""
        if not self.uses(peer):
            return
        worker = peer.address.worker
        if worker == self.decode and self.stage != "queue":
            if not self._host.sessions.alive(Role.DECODE):
                self._end(NoDecodeWorkersError(f"decode worker {worker} was lost: {reason}"))
            else:
                self._end(WorkerLostError(f"decode worker {worker} was lost: {reason}"))
        elif worker == self.prefill and not self._decode_spoke and self.stage != "queue":
            error = HandoffError(f"prefill worker {worker} was lost: {reason}")
            if self.stage == "handoff" and self.decode is not None:  # it may have committed
                loop = asyncio.get_running_loop()
                loop.call_later(VERDICT_S, self._end_unless_decoding, error)
            else:
                self._end(error)

    def _end_unless_decoding(self, error: DiptychError) -> None:
        if not self._decode_spoke:
            self._end(error)

    def _end(self, error: DiptychError) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()

    # ---- placing --------------------------------------------------------------------------------

    async def _place(self) -> bool:
        """Reserve and submit; False asks for another try with a new attempt number."""
        asked_s = monotonic_s()
        async with self._host.line.turn():
            decision, route_s, reserve_s = await self._reserve()
        reserved_s, attempt = monotonic_s() - reserve_s, self.key.attempt
        routed_s = reserved_s - route_s
        self.record.add_phase("admit", "ingress", asked_s, routed_s - asked_s, attempt)
        self.record.add_phase("route", "ingress", routed_s, route_s, attempt)
        self.record.add_phase("reserve", decision.decode or "", reserved_s, reserve_s, attempt)
        self.record.decision = decision
        reason = "retry" if self.record.attempts else "first"
        self.record.attempts.append(AttemptRecord(self.prefill, self.decode, reason))
        return decision.kind == "local" or await self._submit(decision)

    async def _reserve(self) -> tuple[Decision, float, float]:
        """At the head of the line: ask until some decode worker takes the job.

        Returns the decision, how long it took to make, and the successful question, seconds.
        """
        while True:
            if not self._host.sessions.alive(Role.DECODE):
                if not self._host.sessions.expects(Role.DECODE):
                    raise NoDecodeWorkersError("no decode worker is alive")
                await self._host.line.changed(RECHECK_S)
                continue
            started_s = monotonic_s()
            decision = self._host.policy.choose(self._host.view(), self._route)
            route_s = monotonic_s() - started_s
            retry_after_s = RECHECK_S
            decodes = dict.fromkeys(c.decode for c in decision.candidates)
            for decode in list(decodes)[:MAX_DECODE_CANDIDATES]:
                asked_s = monotonic_s()
                refused = await self._ask_decode(decode, decision)
                if refused is None:
                    return replace(decision, decode=decode), route_s, monotonic_s() - asked_s
                self._judge(refused)
                retry_after_s = min(retry_after_s, refused.retry_after_s or RECHECK_S)
            await self._host.line.changed(max(MIN_RECHECK_S, retry_after_s))

    async def _ask_decode(self, decode: WorkerId, decision: Decision) -> Refused | None:
        """Reserve on one worker, or submit for local prefill. None means it took the job.

        A job that ends with token 1 needs no room on a decode worker, so none is reserved.
        """
        needs_decode = decision.kind == "local" or self._job.sampling.max_tokens > 1
        self._bind(decision.prefill, decode if needs_decode else None)
        self._host.register(self)
        if not needs_decode:
            return None
        job = self._timed_job()
        answer = await self._call(
            decode, SubmitLocal(job) if decision.kind == "local" else Reserve(job)
        )
        if isinstance(answer, Reserved | Accepted):
            if decision.kind == "local":
                self.stage = "decode"
            return None
        self._host.unregister(self)
        if isinstance(answer, Refused):
            self._bind(None, None)
            return answer
        # No answer: whatever became of the question, this attempt is over there.
        self._tell(decode, Cancel(self.key))
        self._bind(None, None)
        self._next_attempt()
        return Refused(self.key, "worker_lost", f"{decode} did not answer", RECHECK_S)

    async def _submit(self, decision: Decision) -> bool:
        """Send the prompt to the prefill worker; the ticket is given back if it refuses."""
        assert decision.prefill is not None
        self.stage = "prefill"
        answer: Message | None = None
        target = self._target()
        if target is not None or self.decode is None:
            body = SubmitPrefill(self._timed_job(), target)
            answer = await self._call(decision.prefill, body)
        if isinstance(answer, Accepted) or self._over.is_set():
            return True
        if isinstance(answer, Refused):
            self._judge(answer)
        self._withdraw()
        self._host.unregister(self)
        self.stage = "queue"
        if isinstance(answer, Refused):
            await self._host.line.changed(min(RECHECK_S, answer.retry_after_s or RECHECK_S))
        return False

    def _target(self) -> WorkerAddress | None:
        peer = None if self.decode is None else self._bound.get(self.decode)
        return None if peer is None or not peer.alive else peer.address

    async def _call(self, worker: WorkerId, body: Message) -> Message | None:
        """Ask a worker; None when it is gone or does not answer."""
        peer = self._bound.get(worker)
        if peer is None or peer.session is None:
            return None
        try:
            return await peer.session.call(body, timeout_s=ANSWER_TIMEOUT_S)
        except (SessionClosedError, DeadlineError):
            return None

    @staticmethod
    def _judge(refused: Refused) -> None:
        """A refusal for ever is the client's answer; one for now is a reason to wait."""
        if refused.retry_after_s is not None:
            return
        if refused.code == ContextLengthError.code:
            raise ContextLengthError(refused.reason)
        raise CapacityError(refused.reason)

    def _timed_job(self) -> GenerationJob:
        return replace(self._job, deadline_s=max(0.0, self._deadline_s - monotonic_s()))

    def _next_attempt(self) -> None:
        key = AttemptKey(self.key.request, self.key.attempt + 1)
        self._job = replace(self._job, key=key)

    def _withdraw(self, *, finished_by_worker: bool = True) -> None:
        """Tell the workers that may still hold something; see the table above."""
        finished = self.journal.finish is not None and finished_by_worker
        if self.decode is not None and not (finished and not self._prefill_finished):
            self._tell(self.decode, Cancel(self.key))
        if self.prefill is not None and not self._decode_spoke and not finished:
            self._tell(self.prefill, Cancel(self.key))
        self._bind(None, None)

    def _bind(self, prefill: WorkerId | None, decode: WorkerId | None) -> None:
        """Depend on these processes from now on, whoever may later carry their ids."""
        self.prefill, self.decode = prefill, decode
        found = {w: self._host.sessions.find(w) for w in (prefill, decode) if w is not None}
        self._bound = {worker: peer for worker, peer in found.items() if peer is not None}

    def _tell(self, worker: WorkerId, body: Message) -> None:
        peer = self._bound.get(worker)
        if peer is not None:
            self._host.sessions.send(peer, body)
