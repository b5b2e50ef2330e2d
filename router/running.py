"""One running client request as the HTTP layer sees it.

Joins the choices of a request into one ordered stream per choice: tokens that the reader has not
taken yet coalesce in a buffer bounded by max_tokens, so a slow reader costs no message and no
worker. The first choice that fails ends the whole request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import DiptychError
from router.generation import ChoiceDelta, Moment, Routed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster.types import FinishReason
    from router.choice import Choice
    from router.records import RequestRecord

log = logging.getLogger(__name__)


class RunningGeneration:
    """Implements `generation.Generation` over the choices of one request."""

    def __init__(self, record: RequestRecord, on_over: Callable[[RunningGeneration], None]) -> None:
        """`on_over` is called once, when nothing of the request runs any more."""
        self.record = record
        self.choices: list[Choice] = []
        self.cancelled_in: str | None = None  # phase in which `aclose` found it unfinished
        self._tasks: list[asyncio.Task[None]] = []
        self._on_over = on_over
        self._pending: dict[int, tuple[list[int], FinishReason | None]] = {}
        self._wake = asyncio.Event()
        self._first: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        self._num_open = 0
        self._error: DiptychError | None = None
        self._closed = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens the prefilling worker took from its cache."""
        return self.record.cached_tokens

    def launch(self, choices: list[Choice], group: asyncio.TaskGroup) -> None:
        """Start every choice as a task of `group`."""
        self.choices = choices
        self._num_open = len(choices)
        self._tasks = [
            group.create_task(self._follow(choice), name=f"{self.record.id}/{choice.index}")
            for choice in choices
        ]

    async def first(self) -> Routed:
        """Wait for token 1 of some choice.

        Raises:
            DiptychError: the request ended before it.
        """
        return await asyncio.shield(self._first)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Everything not yet taken, choice by choice, until all are finished.

        Raises:
            DiptychError: the request failed after token 1.
        """
        while True:
            while self._pending:
                index = next(iter(self._pending))
                tokens, finish = self._pending.pop(index)
                yield ChoiceDelta(index, tuple(tokens), finish)
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return
            self._wake.clear()
            await self._wake.wait()

    def stop_choice(self, index: int, reason: FinishReason, num_tokens: int) -> None:
        """A stop string ended this choice: workers are told, no further tokens come."""
        self._pending.pop(index, None)
        self.choices[index].stop(reason, num_tokens)

    def mark(self, name: Moment) -> None:
        """Note a moment that only the HTTP layer sees."""
        now_s = monotonic_s() - self.record.received_s
        if name == "first_byte" and self.record.ttft_s is None:
            self.record.ttft_s = now_s
            token_one_s = self.record.token_one_s
            if token_one_s is not None:
                start_s = self.record.received_s + token_one_s
                self.record.add_phase("first_flush", "ingress", start_s, now_s - token_one_s)
        elif name == "disconnect" and self.record.status == "running":
            self.record.status = "cancelled"
        elif name == "done":
            self.record.e2e_s = now_s

    async def aclose(self) -> None:
        """Cancel whatever still runs and finish the record; safe to call again."""
        if self._closed:
            return
        self._closed = True
        unfinished = [choice for choice in self.choices if choice.finish is None]
        self.cancelled_in = unfinished[0].stage if unfinished else None
        for task in self._tasks:
            task.cancel()
        self._finish_record()
        self._on_over(self)

    # ---- from the choices -----------------------------------------------------------------------

    def on_delta(self, choice: Choice, delta: ChoiceDelta) -> None:
        """New tokens of a choice, in order."""
        record = self.record
        if record.token_one_s is None:
            record.token_one_s = monotonic_s() - record.received_s
        held, _ = self._pending.get(choice.index, ([], None))
        held.extend(delta.token_ids)
        self._pending[choice.index] = (held, delta.finish)
        if not self._first.done():
            self._first.set_result(Routed(choice.prefill, choice.decode, record.cached_tokens))
        self._wake.set()

    async def _follow(self, choice: Choice) -> None:
        """Task root of a choice: its failure is the request's."""
        try:
            await choice.run()
        except DiptychError as error:
            self._fail(error)
        except Exception as error:  # task root: the request fails, the ingress goes on
            log.exception("request %s failed unexpectedly", self.record.id)
            self._fail(DiptychError(f"internal error: {error}"))
        finally:
            self._num_open -= 1
            self._wake.set()

    def _fail(self, error: DiptychError) -> None:
        if self._error is not None:
            return
        self._error = error
        self.record.error_code = error.code
        if self.record.status == "running":
            self.record.status = "failed"
        if not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # read here: nobody may be waiting for it any more
        for other in self._tasks:
            if other is not asyncio.current_task():
                other.cancel()

    def _finish_record(self) -> None:
        record = self.record
        finishes = [choice.finish for choice in self.choices]
        if record.status == "running":
            complete = all(finish is not None for finish in finishes)
            record.status = "completed" if complete else "cancelled"
        record.completion_tokens = sum(choice.journal.num_tokens for choice in self.choices)
        first = next((finish for finish in finishes if finish is not None), None)
        record.finish_reason = None if first is None else first.value
        if record.e2e_s is None:
            record.e2e_s = monotonic_s() - record.received_s
        if record.ttft_s is None:
            record.ttft_s = record.token_one_s
        if record.token_one_s is not None:
            record.add_phase(
                "stream",
                "ingress",
                record.received_s + record.token_one_s,
                record.e2e_s - record.token_one_s,
            )
        if not self._first.done():
            self._first.cancel()
