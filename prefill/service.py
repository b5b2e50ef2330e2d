"""A prefill worker without Ray: sessions, engine and handoff wired together.

A job comes in by `SubmitPrefill`, its prompt is computed, token 1 goes to the ingress at once, and
the KV blocks go to the decode worker chunk by chunk behind the compute. The job stays on the table
until the decode worker has acknowledged a verified copy, so that cancel, deadline or a dead ingress
can still free what it holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.assembly import engine_loader, worker_settings
from cluster.attempts import AttemptBook, Verdict
from cluster.clock import monotonic_s
from cluster.loop import EngineThread
from cluster.types import AttemptKey, PhaseRecord, Role, TokenDelta, WorkerState
from cluster.wire.messages import Message, Refused, SubmitPrefill
from cluster.worker import JobEntry, LoadFigures, WorkerBase, WorkerSettings
from prefill.engine import AddJob, CancelJob, Nudge, PrefillCommand, PrefillCore, PrefillEvent
from prefill.handoff import Handoff
from prefill.scheduler import PrefillScheduler, Progress, PromptDone, Started

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.config import Config
    from cluster.errors import HandoffError
    from cluster.model.identity import ModelFolder
    from cluster.model.runner import LoadedEngine
    from cluster.types import WorkerId
    from cluster.wire.session import Identity, Session

MAX_QUEUE_S = 2.0  # predicted seconds of queued prompts before a busy worker refuses


class PrefillService(WorkerBase):
    """The worker object that a Serve replica, a plain process or `--local` runs."""

    def __init__(self, settings: WorkerSettings, load: Callable[[], LoadedEngine]) -> None:
        """`load` runs in the engine thread."""
        super().__init__(settings)
        self._scheduler = PrefillScheduler(
            self.ledger,
            block_size=settings.facts.block_size,
            chunk_tokens=settings.chunk_tokens,
            max_running=settings.max_running,
            max_wait_s=settings.batch_max_wait_s,
            seed_for=self.seed_for,
        )
        self._core = PrefillCore(self._scheduler, self.ledger, load)
        self._engine: EngineThread[PrefillCommand, PrefillEvent] = EngineThread(
            f"engine-{settings.worker}",
            self._core,
            deliver=self._on_events,
            failed=self._engine_failed,
        )
        self._attempts = AttemptBook()
        self._handoff: Handoff | None = None

    # ---- WorkerBase -----------------------------------------------------------------------------

    def _open_links(self, identity: Identity) -> None:
        self._handoff = Handoff(
            identity,
            self.settings.session,
            self._core.loaded.pool,
            self.ledger,
            block_size=self.settings.facts.block_size,
            frame_bytes=self.settings.frame_bytes,
            checksum=self.settings.checksum,
            on_done=self._on_handed_off,
            seed_for=self.seed_for,
            host=self.settings.host,
        )

    async def _close_links(self) -> None:
        if self._handoff is not None:
            await self._handoff.stop()

    def _load_figures(self) -> LoadFigures:
        handoff = self._handoff
        assert handoff is not None
        return LoadFigures(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            open_transfers=handoff.open_transfers,
            peer_sessions=handoff.num_sessions,
            handoff_bytes_sent=handoff.bytes_sent,
            links=handoff.links(),
        )

    def _handle(self, session: Session, body: Message, call: int | None) -> None:
        if isinstance(body, SubmitPrefill):
            self._submit(session, body, call)
        else:
            session.close(f"a prefill worker takes no {type(body).__name__}")

    def _release(self, key: AttemptKey, entry: JobEntry | None) -> None:
        self._attempts.close(key, monotonic_s())
        if entry is None:
            return
        self._engine.post(CancelJob(key))
        if entry.decode is not None and self._handoff is not None:
            self._handoff.cancel(key)

    # ---- jobs -----------------------------------------------------------------------------------

    def _submit(self, session: Session, body: SubmitPrefill, call: int | None) -> None:
        job = body.job
        refused = self._refusal(body)
        if refused is not None:
            self._refuse(session, call, refused)
            return
        match self._attempts.admit(job.key, monotonic_s()):
            case Verdict.DUPLICATE:
                self._accept(session, job.key, call)
                return
            case Verdict.STALE | Verdict.OVER as verdict:
                reason = f"attempt {job.key.attempt} is {verdict.value}"
                self._refuse(session, call, Refused(job.key, "stale_attempt", reason, None))
                return
            case Verdict.NEW:
                pass
        self._hold(session, job, body.decode)
        if body.decode is not None and self._handoff is not None:
            self._handoff.start(job, body.decode)
        self._engine.post(AddJob(job, hand_off=body.decode is not None))
        self._accept(session, job.key, call)

    def _refusal(self, body: SubmitPrefill) -> Refused | None:
        """Every check this worker will ever make, answered at once."""
        key, facts = body.job.key, self.settings.facts
        num_tokens = len(body.job.prompt_token_ids) + len(body.job.forced_token_ids)
        if self.state is not WorkerState.READY or self.healthy() is not None:
            return Refused(key, "worker_lost", f"{self.settings.worker} is {self.state}", 1.0)
        impossible = self._impossible(body.job)
        if impossible is not None:
            return impossible
        if -(-num_tokens // facts.block_size) > self.settings.kv_blocks:
            reason = f"{num_tokens} prompt tokens exceed the pool of {self.settings.worker}"
            return Refused(key, "context_length_exceeded", reason, None)
        rate = self._core.meter.prefill_tokens_per_s
        queue_s = self._scheduler.waiting_tokens / rate if rate > 0 else 0.0
        if queue_s > MAX_QUEUE_S and key not in self._jobs:
            reason = f"{queue_s:.1f} s of prompts are queued"
            return Refused(key, "overloaded", reason, queue_s - MAX_QUEUE_S)
        return None

    def _on_events(self, events: Sequence[PrefillEvent]) -> None:
        """One turn of the engine, in order."""
        deltas: list[TokenDelta] = []
        done: list[tuple[PromptDone, TokenDelta]] = []
        for event in events:
            match event:
                case Started():
                    self._bind(event)
                case Progress(key, computed_tokens):
                    if self._hands_off(key) and self._handoff is not None:
                        self._handoff.progress(key, computed_tokens)
                case PromptDone(key, token_id):
                    delta = TokenDelta(
                        key=key,
                        position=len(self._jobs[key].job.forced_token_ids)
                        if key in self._jobs
                        else 0,
                        token_ids=(token_id,),
                        finish=event.finish,
                        cached_tokens=event.cached_tokens,
                        phases=_phases(event),
                    )
                    deltas.append(delta)
                    done.append((event, delta))
        self._send_tokens(deltas)  # before anything else: TTFT never waits for the handoff
        for event, delta in done:
            self._prompt_done(event, delta)
        if done:
            self.changed()

    def _bind(self, event: Started) -> None:
        """Pass the engine's extra reference on, or give it back if the job is gone."""
        is_wanted = self._hands_off(event.key)
        if is_wanted and self._handoff is not None:
            self._handoff.bind(event.key, event.block_ids)
        self.ledger.release(event.block_ids)
        if not is_wanted:  # the engine has cancelled it already, and may wait for these blocks
            self._engine.post(Nudge())

    def _hands_off(self, key: AttemptKey) -> bool:
        entry = self._jobs.get(key)
        return entry is not None and entry.decode is not None

    def _prompt_done(self, event: PromptDone, delta: TokenDelta) -> None:
        entry = self._jobs.get(event.key)
        if entry is None:
            return
        if entry.decode is not None and self._handoff is not None:
            if event.finish is None:
                self._handoff.finish(event.key, replace(delta, phases=()))
                return
            self._handoff.cancel(event.key)
        self._attempts.close(event.key, monotonic_s())
        self._forget(event.key)

    def _on_handed_off(self, key: AttemptKey, error: HandoffError | None) -> None:
        """The transfer ended, well or not; its references are released."""
        self._engine.post(Nudge())
        if error is not None and key in self._jobs:
            self._engine.post(CancelJob(key))
            self._fail(key, error.code, error.message)
        self._attempts.close(key, monotonic_s())
        self._forget(key)
        self.changed()


def _phases(event: PromptDone) -> tuple[PhaseRecord, ...]:
    return (
        PhaseRecord("prefill.queue", event.compute_s, event.queue_s),
        PhaseRecord("prefill.compute", 0.0, event.compute_s),
    )


def build(config: Config, folder: ModelFolder, worker: WorkerId, secret: bytes) -> PrefillService:
    """Build the worker of a config; nothing is loaded before `start`.

    Raises:
        ModelError: the model's folder lacks what serving needs.
    """
    settings = worker_settings(config, folder, worker=worker, role=Role.PREFILL, secret=secret)
    return PrefillService(settings, engine_loader(config, folder, Role.PREFILL))
