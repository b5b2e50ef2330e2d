"""The life of client requests between the HTTP layer and the workers.

`Flow` is the ingress' token layer: it turns a `ClientRequest` into choices, hands each to the
waiting line and the policy, and routes what workers say to the choice it belongs to. It promises
that a request ends exactly once (finished, failed or cancelled), that nothing a worker held for it
survives that end, and that a lost worker fails only the requests that needed it. Never imports
torch; text, SSE and status codes are not its business.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.clock import monotonic_s
from cluster.errors import ContextLengthError, DiptychError
from cluster.types import (
    AttemptKey,
    GenerationJob,
    ModelFacts,
    RequestId,
    Role,
    SamplingParams,
    TokenDelta,
    WorkerId,
    WorkerSnapshot,
)
from router.choice import Choice
from router.generation import ClientRequest, Readiness
from router.line import WaitingLine
from router.policy import DecodeView, Policy, PrefillView, RouteRequest, RoutingView
from router.records import RequestLog, RequestRecord
from router.running import RunningGeneration
from router.sessions import Peer, WorkerSessions
from router.status import IngressFacts, status_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.wire.messages import Failed
    from cluster.wire.session import Identity, SessionOptions
    from router.directory import WorkerDirectory

PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """The plain values a flow is built from."""

    ingress: IngressFacts
    is_disaggregated: bool
    prefill_pool_tokens: int  # capacity of one prefill worker's pool
    decode_pool_tokens: int  # capacity of one decode worker's pool
    local_prefill_max_tokens: int
    max_waiting: int
    queue_timeout_s: float


class FlowObserver:
    """What metrics want to hear; the default hears nothing."""

    def request_over(self, record: RequestRecord, cancelled_in: str | None) -> None:
        """A client request ended; `cancelled_in` names the phase a disconnect found it in."""

    def worker_reported(self, snapshot: WorkerSnapshot) -> None:
        """A worker sent its state."""


class Flow:
    """Implements `generation.FlowApi` and the sink of the worker sessions."""

    def __init__(
        self,
        settings: FlowSettings,
        facts: ModelFacts,
        me: Identity,
        options: SessionOptions,
        directory: WorkerDirectory,
        policy: Policy,
        *,
        observer: FlowObserver,
        render: Callable[[], str],
    ) -> None:
        """`run` must be running for requests to be served; `render` gives the metrics text."""
        self.sessions = WorkerSessions(me, options, directory, self)
        self.line = WaitingLine(
            max_waiting=settings.max_waiting, timeout_s=settings.queue_timeout_s
        )
        self.policy = policy
        self.log = RequestLog()
        self._settings = settings
        self._facts = facts
        self._observer = observer
        self._render = render
        self._choices: dict[AttemptKey, Choice] = {}
        self._running: set[RunningGeneration] = set()
        self._group: asyncio.TaskGroup | None = None
        self._proven = asyncio.Event()
        self._peers_changed = asyncio.Event()
        self.num_stray_tokens = 0  # for attempts nobody waits for any more

    # ---- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled; running requests are cancelled with it."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self.sessions.run(), name="worker sessions")
            await self._prove()
            await asyncio.get_running_loop().create_future()

    async def _prove(self) -> None:
        """Send test requests until one token has passed the whole path."""
        while not self._proven.is_set():
            await self._peers_changed.wait()
            self._peers_changed.clear()
            if self._has_workers():
                try:
                    await self._probe()
                except DiptychError:
                    continue
                self._proven.set()

    def _has_workers(self) -> bool:
        wants_prefill = self._settings.is_disaggregated
        has_prefill = bool(self.sessions.alive(Role.PREFILL)) or not wants_prefill
        return has_prefill and bool(self.sessions.alive(Role.DECODE))

    async def _probe(self) -> None:
        """Two greedy tokens after a two-token prompt: too short to enter any prefix cache."""
        request = ClientRequest(
            id=f"probe-{secrets.token_hex(4)}",
            client_request_id="probe",
            kind="completion",
            model=self._facts.served_name,
            prompts=((1, 2),),
            n=1,
            sampling=SamplingParams(max_tokens=2),
            seed_given=True,
            stream=False,
            timeout_s=PROBE_TIMEOUT_S,
            received_s=monotonic_s(),
            tokenize_s=0.0,
        )
        generation = self._launch(request, remember=False)
        try:
            async for _ in generation.deltas():
                pass
        finally:
            await generation.aclose()

    # ---- FlowApi --------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """The served model."""
        return self._facts

    def start(self, request: ClientRequest) -> RunningGeneration:
        """Check that the request can ever fit, then start all its choices.

        Raises:
            ContextLengthError: some prompt plus max_tokens exceeds the model or the pools.
        """
        return self._launch(self._fitted(request), remember=True)

    def ready(self) -> Readiness:
        """Liveness of the pools, and whether a token has ever passed the whole path."""
        if not self.sessions.alive(Role.DECODE):
            return Readiness("unready", ("no decode workers", *self._refusals()))
        if not self._proven.is_set():
            return Readiness("unready", ("no token has passed the whole path yet",))
        reasons = self._refusals()
        if self._settings.is_disaggregated and not self.sessions.alive(Role.PREFILL):
            reasons = ("no prefill workers", *reasons)
        return Readiness("degraded" if reasons else "ready", reasons)

    def status(self) -> dict[str, Any]:
        """The object of `status --json`."""
        is_ready = self.ready().status != "unready"
        return status_object(
            self._settings.ingress, self._facts, self.sessions.peers, ready=is_ready
        )

    def requests(self) -> list[dict[str, Any]]:
        """Recent requests, newest first."""
        return [record.as_dict() for record in self.log.newest_first()]

    def request(self, request_id: str) -> dict[str, Any] | None:
        """One request by our id."""
        record = self.log.find(request_id)
        return None if record is None else record.as_dict()

    def render_metrics(self) -> str:
        """The Prometheus text exposition."""
        return self._render()

    @property
    def num_waiting(self) -> int:
        """Choices in the waiting line."""
        return len(self.line)

    # ---- ChoiceHost -----------------------------------------------------------------------------

    def view(self) -> RoutingView:
        """What each live worker said last, or what we gave it since, whichever is more."""
        charged: dict[WorkerId, int] = {}
        reserved: dict[WorkerId, int] = {}
        for choice in self._choices.values():
            if choice.prefill is not None:
                tokens = charged.get(choice.prefill, 0) + choice.queued_prompt_tokens
                charged[choice.prefill] = tokens
            if choice.decode is not None:
                reserved[choice.decode] = reserved.get(choice.decode, 0) + 1
        return RoutingView(
            prefill=tuple(
                self._prefill_view(peer, charged.get(peer.address.worker, 0))
                for peer in self.sessions.alive(Role.PREFILL)
            ),
            decode=tuple(
                self._decode_view(peer, reserved.get(peer.address.worker, 0))
                for peer in self.sessions.alive(Role.DECODE)
            ),
            is_disaggregated=self._settings.is_disaggregated,
            local_prefill_max_tokens=self._settings.local_prefill_max_tokens,
        )

    def register(self, choice: Choice) -> None:
        """Route tokens of the choice's current attempt to it."""
        self._choices[choice.key] = choice

    def unregister(self, choice: Choice) -> None:
        """Forget the attempt; its place may be free for another."""
        if self._choices.pop(choice.key, None) is not None:
            self.sessions.let_go()
            self.line.notify()

    # ---- SessionSink ----------------------------------------------------------------------------

    def tokens(self, worker: WorkerId, deltas: Sequence[TokenDelta]) -> None:
        """One engine step of one worker."""
        arrived_s = monotonic_s()
        for delta in deltas:
            choice = self._choices.get(delta.key)
            if choice is None:
                self.num_stray_tokens += len(delta.token_ids)
            else:
                choice.accept(worker, delta, arrived_s)

    def failed(self, worker: WorkerId, failure: Failed) -> None:
        """An attempt ended on a worker; stale ones are nobody's business."""
        choice = self._choices.get(failure.key)
        if choice is not None:
            choice.failed(worker, failure)

    def worker_lost(self, peer: Peer, reason: str) -> None:
        """Fail the choices that needed this worker."""
        for choice in list(self._choices.values()):
            choice.worker_lost(peer, reason)

    def needs(self, peer: Peer) -> bool:
        """Whether any placed choice depends on this very process."""
        return any(choice.uses(peer) for choice in self._choices.values())

    def reported(self, snapshot: WorkerSnapshot) -> None:
        """A worker sent its state: count it, and let whoever waits look again."""
        self._observer.worker_reported(snapshot)
        self.changed()

    def changed(self) -> None:
        """Wake the head of the line and the probe."""
        self.line.notify()
        self._peers_changed.set()

    # ---- inside ---------------------------------------------------------------------------------

    def _fitted(self, request: ClientRequest) -> ClientRequest:
        """The request with max_tokens bounded by what fits, if the client left it open."""
        longest = max(len(prompt) for prompt in request.prompts)
        # The last token is sampled but never computed, so it needs no room in a pool.
        most = min(self._facts.max_len, self._settings.decode_pool_tokens + 1) - longest
        if most < 1 or (request.max_tokens_given and request.sampling.max_tokens > most):
            param = "prompt" if request.kind == "completion" else "messages"
            raise ContextLengthError(
                f"the prompt has {longest} tokens and max_tokens is "
                f"{request.sampling.max_tokens}, but prompt and output together may have at most "
                f"{longest + most} tokens here",
                param=param if most < 1 else "max_tokens",
            )
        if request.sampling.max_tokens <= most:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    def _launch(self, request: ClientRequest, *, remember: bool) -> RunningGeneration:
        if self._group is None:
            raise DiptychError("the ingress is not running")
        started_s = monotonic_s()
        record = RequestRecord(
            id=request.id,
            trace_id=_trace_id(request.traceparent),
            tenant=request.tenant,
            received_s=request.received_s,
            prompt_tokens=sum(len(prompt) for prompt in request.prompts),
            label=request.client_request_id,
        )
        accept_s = max(0.0, started_s - request.received_s - request.tokenize_s)
        record.add_phase("accept", "ingress", request.received_s, accept_s)
        record.add_phase("tokenize", "ingress", started_s - request.tokenize_s, request.tokenize_s)
        if remember:
            self.log.add(record)
        generation = RunningGeneration(record, self._over if remember else self._running.discard)
        choices = [
            self._choice(request, record, generation, index) for index in range(request.num_choices)
        ]
        self._running.add(generation)
        generation.launch(choices, self._group)
        return generation

    def _choice(
        self,
        request: ClientRequest,
        record: RequestRecord,
        generation: RunningGeneration,
        index: int,
    ) -> Choice:
        prompt = request.prompts[index // request.n]
        seed = request.sampling.seed if request.seed_given else secrets.randbits(63)
        job = GenerationJob(
            key=AttemptKey(RequestId(f"{request.id}-{index}"), 1),
            prompt_token_ids=prompt,
            sampling=replace(request.sampling, seed=seed, choice=index % request.n),
            cache_salt="" if request.tenant == "default" else request.tenant,
            traceparent=request.traceparent,
        )
        route = RouteRequest(len(prompt), request.sampling.max_tokens, request.mode)
        return Choice(
            self,
            job,
            index,
            route,
            record,
            deadline_s=request.received_s + request.timeout_s,
            on_delta=generation.on_delta,
        )

    def _over(self, generation: RunningGeneration) -> None:
        self._running.discard(generation)
        cancelled = generation.record.status == "cancelled"
        self._observer.request_over(
            generation.record, generation.cancelled_in if cancelled else None
        )

    def _prefill_view(self, peer: Peer, charged_tokens: int) -> PrefillView:
        snapshot = peer.snapshot
        return PrefillView(
            worker=peer.address.worker,
            queued_tokens=max(charged_tokens, snapshot.waiting_tokens if snapshot else 0),
            tokens_per_s=snapshot.prefill_tokens_per_s if snapshot else 0.0,
            pool_tokens=self._settings.prefill_pool_tokens,
        )

    def _decode_view(self, peer: Peer, reserved: int) -> DecodeView:
        snapshot = peer.snapshot
        if snapshot is None:
            return DecodeView(peer.address.worker, reserved, 0, 0.0, 0.0)
        blocks = snapshot.blocks
        held = snapshot.running + snapshot.waiting + snapshot.tickets
        return DecodeView(
            worker=peer.address.worker,
            requests=max(reserved, held),
            free_tokens=(blocks.free + blocks.cached - blocks.promised) * self._facts.block_size,
            tokens_per_s=snapshot.prefill_tokens_per_s,
            step_s=snapshot.decode_step_s,
        )

    def _refusals(self) -> tuple[str, ...]:
        """Listed workers that refuse this ingress, with the differing field they named."""
        return tuple(
            f"{peer.address.worker}: {peer.refusal}"
            for peer in self.sessions.peers
            if peer.refusal is not None
        )


def _trace_id(traceparent: str | None) -> str:
    """Trace id of a W3C traceparent, or a fresh one: 32 hex digits."""
    parts = traceparent.split("-") if traceparent else []
    is_valid = len(parts) == 4 and len(parts[1]) == 32
    return parts[1] if is_valid else secrets.token_hex(16)
