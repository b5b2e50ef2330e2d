"""The one bridge between a worker's event loop and its engine thread.

`EngineThread` owns the thread in which every torch call of a worker happens: it opens the core
there, hands it commands between steps, runs steps while there is work and sleeps on a queue when
there is none. Events go back to the event loop in one call per turn. A core or a receiver of its
events that raises ends the thread, and the failure reaches the loop at once with its traceback;
nothing dies silently.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cluster.clock import monotonic_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event")
C = TypeVar("C")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Turn(Generic[E]):
    """What one call of `step` did: its events, and when to call again without a command.

    `wake_at_s` (monotonic) None means: only a command can create work.
    """

    events: Sequence[E]
    wake_at_s: float | None


class EngineCore(Protocol[Command, Event]):
    """What runs inside the engine thread; never touched from anywhere else once started."""

    def open(self) -> None:
        """Load whatever the core needs; called once, first thing in the thread."""

    def handle(self, command: Command) -> None:
        """Apply one command between two steps."""

    def step(self, now_s: float) -> Turn[Event]:
        """Run at most one step."""


class EngineThread(Generic[C, E]):
    """One core, one thread, one inbox.

    `deliver` is called on the event loop with each turn's events; `failed` once, also on the loop,
    if the core or `deliver` raises. `post` may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore[C, E],
        *,
        deliver: Callable[[Sequence[E]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Remember the wiring; nothing runs before `start`."""
        self._name = name
        self._core = core
        self._deliver = deliver
        self._failed = failed
        self._inbox: queue.SimpleQueue[C | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._step_started_s: float | None = None
        self.error: BaseException | None = None

    async def start(self) -> None:
        """Start the thread and wait until `core.open` has returned.

        Raises:
            BaseException: whatever `open` raised.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(loop, opened), name=self._name, daemon=True
        )
        self._thread.start()
        await opened

    def post(self, command: C) -> None:
        """Queue a command; it takes effect before the next step."""
        self._inbox.put(command)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Let the current step end, then end the thread; waits at most `timeout_s`."""
        if self._thread is None:
            return
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def step_age_s(self) -> float:
        """Seconds the step now running has taken; 0 while the engine is idle."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else monotonic_s() - started_s

    def _main(self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None]) -> None:
        try:
            self._core.open()
        except BaseException as error:  # noqa: BLE001 - task root: handed to `start`
            _call(loop, _settle, opened, error)
            return
        _call(loop, _settle, opened, None)
        try:
            self._turns(loop)
        except BaseException as error:  # task root: the worker becomes unhealthy
            log.exception("engine thread %s failed", self._name)
            _call(loop, self._give_up, error)

    def _turns(self, loop: asyncio.AbstractEventLoop) -> None:
        wake_at_s: float | None = None
        while self._take(wake_at_s):
            now_s = monotonic_s()
            self._step_started_s = now_s
            turn = self._core.step(now_s)
            self._step_started_s = None
            if turn.events:
                _call(loop, self._hand_over, turn.events)
            wake_at_s = turn.wake_at_s

    def _hand_over(self, events: Sequence[E]) -> None:
        """Deliver one turn, on the loop; a receiver that raises has lost track of its jobs."""
        if self.error is not None:
            return
        try:
            self._deliver(events)
        except Exception as error:  # task root: the worker becomes unhealthy
            log.exception("events of engine thread %s could not be handled", self._name)
            self._inbox.put(None)
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._failed(error)

    def _take(self, wake_at_s: float | None) -> bool:
        """Apply all queued commands, waiting for one until `wake_at_s`; False means stop."""
        try:
            timeout_s = None if wake_at_s is None else wake_at_s - monotonic_s()
            if timeout_s is None or timeout_s > 0:
                command = self._inbox.get(timeout=timeout_s)
            else:
                command = self._inbox.get_nowait()
            while True:
                if command is None:
                    return False
                self._core.handle(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Run `function` on the loop; a loop that is already closed has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        log.debug("event loop closed before %s could be delivered", function)
