"""What prefill and decode workers share around their engines.

`WorkerBase` owns the ingress sessions, the table of jobs held for them, deadlines, snapshots,
draining and health. It promises that everything held on behalf of an ingress is dropped when its
session ends or the job's deadline passes, and that an engine that failed fails every job at once.
It never looks at a tensor and knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import ContextLengthError, RequestError, SessionClosedError
from cluster.kv.allocator import BlockLedger
from cluster.kv.hashing import chain_seed
from cluster.types import (
    AttemptKey,
    GenerationJob,
    Incarnation,
    LinkStatus,
    ModelFacts,
    Role,
    TokenDelta,
    WorkerAddress,
    WorkerId,
    WorkerSnapshot,
    WorkerState,
)
from cluster.vitals import read_vitals
from cluster.wire.messages import Accepted, Cancel, Failed, Message, Refused, Snapshot, Tokens
from cluster.wire.session import Identity, Session, SessionOptions, SessionServer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.loop import EngineThread
    from cluster.model.core import LoadingCore

log = logging.getLogger(__name__)

SNAPSHOT_COALESCE_S = 0.05  # a change is published at most this late
MAX_STEP_AGE_S = 60.0  # a step that takes longer means the engine hangs


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The plain values a worker is built from."""

    worker: WorkerId
    role: Role
    facts: ModelFacts
    kv_blocks: int
    chunk_tokens: int
    max_running: int
    batch_max_wait_s: float
    prefix_cache: bool
    frame_bytes: int
    checksum: bool
    host: str
    session: SessionOptions


@dataclass(slots=True)
class JobEntry:
    """A job this worker holds for an ingress."""

    job: GenerationJob
    session: Session
    decode: WorkerAddress | None  # prefill side: where the KV goes
    deadline: asyncio.TimerHandle


class WorkerBase(ABC):
    """The Ray-free worker process object; subclasses add engine, links and messages."""

    _core: LoadingCore  # what runs in the engine thread
    _engine: EngineThread[Any, Any]

    def __init__(self, settings: WorkerSettings) -> None:
        """Build what needs no torch; `start` does the rest."""
        self.settings = settings
        self.incarnation = Incarnation(secrets.token_hex(8))
        self.ledger = BlockLedger(
            settings.kv_blocks, settings.facts.block_size, prefix_cache=settings.prefix_cache
        )
        self.state = WorkerState.STARTING
        self.address: WorkerAddress | None = None
        self.phases_s: dict[str, float] = {}
        self._jobs: dict[AttemptKey, JobEntry] = {}
        self._ingresses: dict[Session, None] = {}
        self._server: SessionServer | None = None
        self._failure: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._publish_timer: asyncio.TimerHandle | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> WorkerAddress:
        """Load the model, then listen. Returns where.

        Raises:
            ModelError: the model cannot be served.
        """
        await self._engine.start()
        loaded = self._core.loaded
        self.phases_s = dict(loaded.phases_s)
        identity = Identity(
            role=self.settings.role,
            peer=self.settings.worker,
            incarnation=self.incarnation,
            layout={"fingerprint": self.settings.facts.fingerprint, **loaded.layout.describe()},
        )
        self._open_links(identity)
        self._server = SessionServer(identity, self, self.settings.session, host=self.settings.host)
        control = await self._server.start()
        self.address = WorkerAddress(
            worker=self.settings.worker,
            role=self.settings.role,
            incarnation=self.incarnation,
            control=control,
            pid=os.getpid(),
        )
        self.state = WorkerState.READY
        self._publish()
        return self.address

    async def drain(self, grace_s: float) -> bool:
        """Take no new work and wait for what is held; True if it all ended within `grace_s`."""
        self.state = WorkerState.DRAINING
        self._publish()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for at most `grace_s`, then end sessions, links and the engine."""
        if grace_s > 0:
            await self.drain(grace_s)
        self.state = WorkerState.DEAD
        if self._publish_timer is not None:
            self._publish_timer.cancel()
        for key in list(self._jobs):
            self._drop(key)
        if self._server is not None:
            await self._server.stop()
        await self._close_links()
        self._core.cut_short()
        await self._engine.stop()

    def healthy(self) -> str | None:
        """None while the worker works, else why it does not."""
        if self._failure is not None:
            return self._failure
        age_s = self._engine.step_age_s()
        if age_s > MAX_STEP_AGE_S:
            return f"engine step has been running for {age_s:.0f} s"
        return None

    # ---- what subclasses provide ----------------------------------------------------------------

    @abstractmethod
    async def _close_links(self) -> None:
        """End the handoff side of this role."""

    @abstractmethod
    def _open_links(self, identity: Identity) -> None:
        """Build the handoff side of this role."""

    @abstractmethod
    def _handle(self, session: Session, body: Message, call: int | None) -> None:
        """A message from an ingress that is not common to both roles."""

    @abstractmethod
    def _release(self, key: AttemptKey, entry: JobEntry | None) -> None:
        """Free everything held for a job that was dropped; unknown keys leave a tombstone."""

    @abstractmethod
    def _load_figures(self) -> LoadFigures:
        """Queue lengths and transfers for the snapshot."""

    # ---- session handler ------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """An ingress connected: it must serve the same model."""
        theirs = session.peer.layout.get("fingerprint")
        if theirs is not None and theirs != self.settings.facts.fingerprint:
            session.close(f"fingerprint differs: {theirs} here {self.settings.facts.fingerprint}")
            return
        self._ingresses[session] = None
        self._publish()

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Dispatch one message of an ingress."""
        if isinstance(body, Cancel):
            self._drop(body.key)
            self.changed()
        else:
            self._handle(session, body, call)

    def closed(self, session: Session, reason: str) -> None:
        """All that was held for this ingress is freed at once."""
        if session not in self._ingresses:
            return
        del self._ingresses[session]
        lost = [key for key, entry in self._jobs.items() if entry.session is session]
        for key in lost:
            self._drop(key)
        if lost:
            log.info("session %s ended (%s): dropped %d jobs", session.peer.peer, reason, len(lost))
        self.changed()

    # ---- jobs -----------------------------------------------------------------------------------

    def _impossible(self, job: GenerationJob) -> Refused | None:
        """Refuse what would break a step, and with it every job of this worker."""
        facts = self.settings.facts
        tokens = job.prompt_token_ids + job.forced_token_ids
        if not job.prompt_token_ids or not 0 <= min(tokens) <= max(tokens) < facts.vocab_size:
            reason = f"a prompt needs token ids, each from 0 to {facts.vocab_size - 1}"
            return Refused(job.key, RequestError.code, reason, None)
        if job.total_tokens >= facts.max_len:  # its last token needs a position, though no room
            reason = f"{job.total_tokens + 1} tokens exceed the model's {facts.max_len}"
            return Refused(job.key, ContextLengthError.code, reason, None)
        return None

    def _hold(self, session: Session, job: GenerationJob, decode: WorkerAddress | None) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, job.deadline_s), self._expire, job.key)
        self._jobs[job.key] = JobEntry(job, session, decode, timer)
        self._idle.clear()

    def _forget(self, key: AttemptKey) -> JobEntry | None:
        """Take a job off the table because it ended by itself."""
        entry = self._jobs.pop(key, None)
        if entry is not None:
            entry.deadline.cancel()
            if not self._jobs:
                self._idle.set()
        return entry

    def _drop(self, key: AttemptKey) -> None:
        """Stop a job from outside: cancel, deadline, dead session."""
        self._release(key, self._forget(key))

    def _expire(self, key: AttemptKey) -> None:
        entry = self._jobs.get(key)
        if entry is None:
            return
        self._drop(key)
        self._tell(entry.session, Failed(key, "deadline_exceeded", "the deadline has passed"))

    def _fail(self, key: AttemptKey, code: str, message: str) -> None:
        """End a job with an error; everything it held must already be freed."""
        entry = self._forget(key)
        if entry is not None:
            self._tell(entry.session, Failed(key, code, message))

    def _engine_failed(self, error: BaseException) -> None:
        """The engine thread raised: nothing here can go on."""
        self._failure = "".join(traceback.format_exception_only(error)).strip()
        for key, entry in list(self._jobs.items()):
            self._drop(key)
            self._tell(
                entry.session, Failed(key, "worker_lost", f"the engine failed: {self._failure}")
            )
        for session in list(self._ingresses):
            session.close(f"engine failed: {self._failure}")

    def _send_tokens(self, deltas: Iterable[TokenDelta]) -> None:
        """One message per session for everything a turn produced."""
        by_session: defaultdict[Session, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            entry = self._jobs.get(delta.key)
            if entry is not None:
                by_session[entry.session].append(delta)
        for session, batch in by_session.items():
            self._tell(session, Tokens(tuple(batch)))

    @staticmethod
    def _tell(session: Session, body: Message) -> None:
        """Send unless the session is over; `closed` frees what was held for it."""
        with contextlib.suppress(SessionClosedError):
            session.send(body)

    def _accept(self, session: Session, key: AttemptKey, call: int | None) -> None:
        session.send(Accepted(key), reply_to=call)

    @staticmethod
    def _refuse(session: Session, call: int | None, refused: Refused) -> None:
        session.send(refused, reply_to=call)

    def seed_for(self, cache_salt: str) -> bytes:
        """Start of the block hash chain for a tenant's salt."""
        return chain_seed(self.settings.facts.fingerprint, cache_salt)

    # ---- snapshots ------------------------------------------------------------------------------

    def snapshot(self) -> WorkerSnapshot:
        """The worker as `status` shows it."""
        figures = self._load_figures()
        meter = self._core.meter
        vitals = read_vitals()
        assert self.address is not None
        return WorkerSnapshot(
            worker=self.settings.worker,
            role=self.settings.role,
            pid=self.address.pid,
            incarnation=self.incarnation,
            state=self.state,
            running=figures.running,
            waiting=figures.waiting,
            waiting_tokens=figures.waiting_tokens,
            blocks=self.ledger.counts(),
            tickets=figures.tickets,
            open_transfers=figures.open_transfers,
            sessions=len(self._ingresses) + figures.peer_sessions,
            prefill_tokens=meter.prefill_tokens,
            generated_tokens=meter.generated_tokens,
            preemptions=figures.preemptions,
            handoff_bytes_sent=figures.handoff_bytes_sent,
            handoff_bytes_received=figures.handoff_bytes_received,
            busy_s=meter.busy_s,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_step_s=meter.decode_step_s,
            threads=vitals.threads,
            fds=vitals.fds,
            rss_bytes=vitals.rss_bytes,
            start_phases_s=self.phases_s,
            links=figures.links,
        )

    def changed(self) -> None:
        """Something worth showing happened: publish soon."""
        self._schedule_publish(SNAPSHOT_COALESCE_S)

    def _schedule_publish(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        when_s = loop.time() + delay_s
        if self._publish_timer is not None:
            if self._publish_timer.when() <= when_s:
                return
            self._publish_timer.cancel()
        self._publish_timer = loop.call_at(when_s, self._publish)

    def _publish(self) -> None:
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        if self._ingresses and self.address is not None:
            body = Snapshot(self.snapshot())
            for session in list(self._ingresses):
                self._tell(session, body)
            self._schedule_publish(self.settings.session.heartbeat_s)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The role-specific part of a snapshot."""

    running: int
    waiting: int
    waiting_tokens: int
    tickets: int = 0
    open_transfers: int = 0
    peer_sessions: int = 0
    preemptions: int = 0
    handoff_bytes_sent: int = 0
    handoff_bytes_received: int = 0
    links: tuple[LinkStatus, ...] = ()
