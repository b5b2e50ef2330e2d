"""A decode worker without Ray: tickets, transfers, engine and ingress sessions wired together.

An ingress reserves room first; then either a prefill worker delivers the KV over a link and the
sequence joins the batch at token 1, or the ingress submits the job for local prefill. The job
stays on the table from its ticket to its last token, so that cancel, deadline or a dead ingress
frees whatever it holds at that moment.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cluster.assembly import engine_loader, worker_settings
from cluster.loop import EngineThread
from cluster.types import (
    AttemptKey,
    BlockId,
    GenerationJob,
    PhaseRecord,
    Role,
    TokenDelta,
    WorkerState,
)
from cluster.wire.messages import Message, Refused, Reserve, Reserved, SubmitLocal
from cluster.worker import JobEntry, LoadFigures, WorkerBase, WorkerSettings
from decode.engine import AddLocal, Attach, CancelJob, DecodeCommand, DecodeCore, Nudge
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler, TokenOut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.config import Config
    from cluster.errors import HandoffError
    from cluster.model.identity import ModelFolder
    from cluster.model.runner import LoadedEngine
    from cluster.types import WorkerId
    from cluster.wire.session import Identity, Session


class DecodeService(WorkerBase):
    """The worker object that a Serve replica, a plain process or `--local` runs."""

    def __init__(self, settings: WorkerSettings, load: Callable[[], LoadedEngine]) -> None:
        """`load` runs in the engine thread."""
        super().__init__(settings)
        self._scheduler = DecodeScheduler(
            self.ledger,
            block_size=settings.facts.block_size,
            chunk_tokens=settings.chunk_tokens,
            max_running=settings.max_running,
            seed_for=self.seed_for,
        )
        self._core = DecodeCore(self._scheduler, load)
        self._engine: EngineThread[DecodeCommand, TokenOut] = EngineThread(
            f"engine-{settings.worker}",
            self._core,
            deliver=self._on_tokens,
            failed=self._engine_failed,
        )
        self._receiver: Receiver | None = None
        self._started: set[AttemptKey] = set()  # jobs past their ticket: in the engine

    # ---- WorkerBase -----------------------------------------------------------------------------

    def _open_links(self, identity: Identity) -> None:
        self._receiver = Receiver(
            self._core.loaded.pool,
            self.ledger,
            block_size=self.settings.facts.block_size,
            frame_bytes=self.settings.frame_bytes,
            checksum=self.settings.checksum,
            seed_for=self.seed_for,
            on_attach=self._on_attach,
            on_failed=self._on_transfer_failed,
            on_freed=partial(self._engine.post, Nudge()),
            host=self.settings.host,
        )

    async def _close_links(self) -> None:
        if self._receiver is not None:
            await self._receiver.stop()

    @property
    def receiver(self) -> Receiver:
        """The transfer side; exists once the engine is open."""
        assert self._receiver is not None
        return self._receiver

    def _load_figures(self) -> LoadFigures:
        receiver = self.receiver
        return LoadFigures(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            tickets=len(receiver.tickets),
            open_transfers=receiver.open_transfers,
            peer_sessions=receiver.num_sessions,
            preemptions=self._scheduler.num_preemptions,
            handoff_bytes_received=receiver.bytes_received,
        )

    def opened(self, session: Session) -> None:
        """Prefill workers go to the receiver, ingresses to the common table."""
        if session.peer.role is Role.PREFILL:
            self.receiver.opened(session)
        else:
            super().opened(session)

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Dispatch by the peer's role."""
        if session.peer.role is Role.PREFILL:
            self.receiver.received(session, body, call)
        else:
            super().received(session, body, call)

    def closed(self, session: Session, reason: str) -> None:
        """Free what was held for the peer."""
        if session.peer.role is Role.PREFILL:
            self.receiver.closed(session, reason)
            self.changed()
        else:
            super().closed(session, reason)

    def _handle(self, session: Session, body: Message, call: int | None) -> None:
        match body:
            case Reserve(job):
                answer = self._reserve(session, job)
                session.send(answer, reply_to=call)
            case SubmitLocal(job):
                self._submit_local(session, job, call)
            case _:
                session.close(f"a decode worker takes no {type(body).__name__} from an ingress")

    def _release(self, key: AttemptKey, entry: JobEntry | None) -> None:
        self._started.discard(key)
        self.receiver.cancel(key)
        if entry is not None:
            self._engine.post(CancelJob(key))

    # ---- jobs -----------------------------------------------------------------------------------

    def _reserve(self, session: Session, job: GenerationJob) -> Reserved | Refused:
        """Every check this worker will ever make, answered at once."""
        if self.state is not WorkerState.READY or self.healthy() is not None:
            return Refused(job.key, "worker_lost", f"{self.settings.worker} is {self.state}", 1.0)
        if job.key not in self._jobs:
            impossible = self._impossible(job)
            if impossible is not None:
                return impossible
            if self._scheduler.has_preempted:
                return Refused(job.key, "overloaded", "a preempted request waits for room", 0.2)
            if len(self._jobs) >= self.settings.max_running:
                return Refused(job.key, "overloaded", f"{len(self._jobs)} requests run here", 0.2)
        answer = self.receiver.reserve(session, job)
        if isinstance(answer, Reserved) and job.key not in self._jobs:
            self._hold(session, job, None)
        return answer

    def _submit_local(self, session: Session, job: GenerationJob, call: int | None) -> None:
        if job.key in self._started:
            self._accept(session, job.key, call)  # a repeated submit changes nothing
            return
        answer = self._reserve(session, job)
        if isinstance(answer, Refused):
            self._refuse(session, call, answer)
            return
        if self.receiver.take(job.key) is None:
            reason = "its KV is arriving from a prefill worker"
            self._refuse(session, call, Refused(job.key, "stale_attempt", reason, None))
            return
        self._started.add(job.key)
        self._engine.post(AddLocal(job))
        self._accept(session, job.key, call)

    def _on_attach(
        self,
        job: GenerationJob,
        block_ids: tuple[BlockId, ...],
        first_output: TokenDelta,
        phases: tuple[PhaseRecord, ...],
    ) -> None:
        """A verified transfer: the sequence joins the batch and its stream starts at token 1."""
        if job.key not in self._jobs:
            self.ledger.release(block_ids)
            self.ledger.forget(job.key)
            return
        self._started.add(job.key)
        self._engine.post(Attach(job, block_ids, first_output.token_ids[0]))
        self._send_tokens(
            [
                TokenDelta(
                    key=job.key,
                    position=first_output.position,
                    token_ids=first_output.token_ids,
                    cached_tokens=first_output.cached_tokens,
                    phases=phases,
                )
            ]
        )
        self.changed()

    def _on_transfer_failed(self, key: AttemptKey, error: HandoffError) -> None:
        """A transfer broke before its commit; its blocks are already on their way back."""
        self._fail(key, error.code, error.message)
        self.changed()

    def _on_tokens(self, outputs: Sequence[TokenOut]) -> None:
        """One turn of the engine: one message per session, then forget what ended."""
        self._send_tokens(
            TokenDelta(
                key=out.key,
                position=out.position,
                token_ids=(out.token_id,),
                finish=out.finish,
                cached_tokens=out.cached_tokens,
                phases=out.phases,
            )
            for out in outputs
        )
        ended = [out.key for out in outputs if out.finish is not None]
        for key in ended:
            self._started.discard(key)
            self._forget(key)
            self.receiver.cancel(key)  # leaves the tombstone that refuses late repeats
        if ended:
            self.changed()


def build(config: Config, folder: ModelFolder, worker: WorkerId, secret: bytes) -> DecodeService:
    """Build the worker of a config; nothing is loaded before `start`.

    Raises:
        ModelError: the model's folder lacks what serving needs.
    """
    settings = worker_settings(config, folder, worker=worker, role=Role.DECODE, secret=secret)
    return DecodeService(settings, engine_loader(config, folder, Role.DECODE))
