"""How late event loops answer: a question that costs nothing, asked at a fixed rate.

The ingress is asked for `/health`; workers are asked on a session for something they refuse at
once. The round trip includes the wire and this process's own lag, which is measured beside it, so
a figure is an upper bound of the loop's lag as a client of it would notice.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Any

from cluster.bench.client import BenchError
from cluster.clock import monotonic_s
from cluster.types import (
    AttemptKey,
    GenerationJob,
    Incarnation,
    RequestId,
    Role,
    SamplingParams,
    WorkerId,
)
from cluster.wire.messages import Cancel, Message, Refused, Reserve, SubmitPrefill
from cluster.wire.session import Identity, Session, SessionOptions, connect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from cluster.bench.client import Endpoint

    Ask = Callable[[], Awaitable[None]]

PERIOD_S = 0.04
ANSWER_TIMEOUT_S = 5.0
NEVER_FITS = 1 << 30  # tokens
HEALTH = b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n"
STATUS = b"GET /debug/status HTTP/1.1\r\nhost: bench\r\n\r\n"


class _SilentHandler:
    """Workers send their state to every ingress; the bench does not look at it."""

    def opened(self, session: Session) -> None:
        """Nothing to do."""

    def received(self, session: Session, body: Message, call: int | None) -> None:
        """Nothing to do."""

    def closed(self, session: Session, reason: str) -> None:
        """An open question fails by itself."""


class IngressProbe:
    """One kept-alive connection to an ingress."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `open` to make one."""
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def open(endpoint: Endpoint) -> IngressProbe:
        """Connect."""
        return IngressProbe(*await asyncio.open_connection(endpoint.host, endpoint.port))

    async def ask(self) -> None:
        """One round trip."""
        self._writer.write(HEALTH)
        await self._read_answer()

    async def status(self) -> dict[str, Any]:
        """The object of `/debug/status`."""
        self._writer.write(STATUS)
        status: dict[str, Any] = json.loads(await self._read_answer())
        return status

    async def _read_answer(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return await self._reader.readexactly(int(length))

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


class SessionProbe:
    """One session to a worker, as an ingress would open it."""

    def __init__(self, session: Session) -> None:
        """Use `open` to make one."""
        self._session = session
        key = AttemptKey(RequestId(f"bench-{secrets.token_hex(4)}"), 1)
        job = GenerationJob(key, (1,), SamplingParams(max_tokens=NEVER_FITS))
        self._question: Message = Reserve(job)
        if session.peer.role is Role.PREFILL:
            session.send(Cancel(key))  # an attempt that is over is refused without further work
            self._question = SubmitPrefill(job, None)

    @staticmethod
    async def open(worker: Mapping[str, str], secret: str) -> SessionProbe:
        """Connect to a worker of `status`."""
        me = Identity(Role.INGRESS, WorkerId("bench"), Incarnation(secrets.token_hex(8)), {})
        session = await connect(
            worker["control"],
            me,
            _SilentHandler(),
            SessionOptions(secret.encode()),
            expect_incarnation=None,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        return SessionProbe(session)

    async def ask(self) -> None:
        """One round trip.

        Raises:
            BenchError: the worker did anything but refuse.
        """
        answer = await self._session.call(self._question, timeout_s=ANSWER_TIMEOUT_S)
        if not isinstance(answer, Refused):
            raise BenchError(f"a worker answered a probe with {type(answer).__name__}")

    def close(self) -> None:
        """Disconnect."""
        self._session.close("probe over")


async def ask_nobody() -> None:
    """What is then measured is how late this process itself is."""


async def sample(ask: Ask, window_s: float) -> list[float]:
    """Ask every `PERIOD_S` for `window_s`; returns seconds from when each question was due.

    The schedule does not wait for answers, so one long stall counts as often as it lasts.
    """
    taken_s = []
    due_s = monotonic_s()
    end_s = due_s + window_s
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - monotonic_s()))
        await ask()
        taken_s.append(monotonic_s() - due_s)
        due_s += PERIOD_S
    return taken_s
