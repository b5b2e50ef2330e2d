"""One generation written to one client: streamed or whole.

Owns the order of things on the wire: the status is decided by token 1, headers and keep-alive
comments leave early if token 1 is late, a failure after the headers is an error event without an
end mark. Text comes from one `TextStream` per choice, so streamed and whole answers are equal by
construction. Writes plain ASGI; knows no routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import DiptychError
from router.http.errors import view_error
from router.http.io import respond, send_last, send_part, start_response
from router.http.responses import FinishedChoice, Head, Usage, whole_response
from router.http.sse import KEEPALIVE, SseWriter, event
from router.http.textstream import TextStream, detokenizer

if TYPE_CHECKING:
    from cluster.tokenizer import Tokenizer
    from router.generation import ChoiceDelta, ClientRequest, Generation, Routed
    from router.http.io import Headers, Send
    from router.http.settings import HttpSettings
    from router.protocol import GenerationBody

OnGap = Callable[[float, int], None]  # seconds before the first of so many tokens; the rest: 0

JSON = "application/json"
_STREAM_HEADERS: Headers = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


class Texts:
    """The texts of all choices of one generation."""

    def __init__(
        self,
        request: ClientRequest,
        body: GenerationBody,
        generation: Generation,
        tokenizer: Tokenizer,
        on_gap: OnGap,
    ) -> None:
        """Start one empty text per choice; `on_gap` hears of the pauses between tokens."""
        self._generation = generation
        self._on_gap = on_gap
        self._heard_s: dict[int, float] = {}  # per choice, when its last token arrived
        self._prompt_tokens = sum(map(len, request.prompts))
        self.streams = [
            TextStream(
                detokenizer(
                    tokenizer,
                    request.prompts[index // request.n],
                    skip_special_tokens=body.skip_special_tokens,
                ),
                stops=body.stop,
                min_tokens=body.min_tokens,
                include_stop=body.include_stop_str_in_output,
            )
            for index in range(request.num_choices)
        ]
        self.num_open = len(self.streams)

    def push(self, delta: ChoiceDelta) -> str:
        """New text of a choice; a stop string in it ends the choice at the generation too."""
        stream = self.streams[delta.index]
        if stream.finish is not None:
            return ""
        self._time(delta)
        text = stream.push(delta.token_ids, delta.finish)
        if stream.finish is not None:
            self.num_open -= 1
            if stream.stopped_by_string:
                self._generation.stop_choice(delta.index, stream.finish, stream.num_tokens)
        return text

    def _time(self, delta: ChoiceDelta) -> None:
        now_s = monotonic_s()
        before_s = self._heard_s.get(delta.index)
        self._heard_s[delta.index] = now_s
        num_gaps = len(delta.token_ids) - (before_s is None)
        if num_gaps > 0:
            self._on_gap(0.0 if before_s is None else now_s - before_s, num_gaps)

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(stream.num_tokens for stream in self.streams),
            cached_tokens=self._generation.cached_tokens,
        )


def routed_headers(routed: Routed) -> Headers:
    """Where the request went, as response headers."""
    workers = (("x-diptych-prefill", routed.prefill), ("x-diptych-decode", routed.decode))
    return (
        *((name, worker) for name, worker in workers if worker is not None),
        ("x-diptych-cached-tokens", str(routed.cached_tokens)),
    )


class WholeAnswer:
    """A response that is sent when everything is there."""

    def __init__(self, generation: Generation, texts: Texts, head: Head, send: Send) -> None:
        """`head` names the response; nothing is sent before `run` knows how it ends."""
        self._generation = generation
        self._texts = texts
        self._head = head
        self._send = send
        self.started = False  # whether the status is on its way

    async def run(self, headers: Headers) -> int:
        """Answer; returns the status."""
        try:
            routed = await self._generation.first()
            self._generation.mark("first_byte")
            body = await self._collect()
        except DiptychError as error:
            view = view_error(error)
            await respond(
                self._send, view.status, view.body(), headers + view.headers, content_type=JSON
            )
            return view.status
        self._generation.mark("done")
        self.started = True
        routed = replace(routed, cached_tokens=self._generation.cached_tokens)  # all prompts' now
        await respond(self._send, 200, body, headers + routed_headers(routed), content_type=JSON)
        return 200

    async def _collect(self) -> bytes:
        parts: list[list[str]] = [[] for _ in self._texts.streams]
        async for delta in self._generation.deltas():
            parts[delta.index].append(self._texts.push(delta))
            if not self._texts.num_open:
                break
        choices = []
        for index, stream in enumerate(self._texts.streams):
            if stream.finish is None:
                raise DiptychError("the generation ended without finishing every choice")
            choices.append(FinishedChoice(index, "".join(parts[index]), stream.finish))
        return whole_response(self._head, choices, self._texts.usage())


class StreamedAnswer:
    """A response that grows with the tokens."""

    def __init__(
        self,
        generation: Generation,
        texts: Texts,
        writer: SseWriter,
        send: Send,
        settings: HttpSettings,
    ) -> None:
        """Nothing is sent before token 1 or `early_headers_s`, whichever comes first."""
        self._generation = generation
        self._texts = texts
        self._writer = writer
        self._send = send
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self.started = False
        self._roles_due = set(range(len(texts.streams)))
        self._has_text = False  # content is in the blocks made so far

    async def run(self, headers: Headers, group: asyncio.TaskGroup) -> int:
        """Answer; returns the status, or the one a late failure would have had."""
        keeper: asyncio.Task[None] | None = None
        try:
            routed = await self._first(headers, group)
            if not self.started:
                await self._start(headers + routed_headers(routed))
            keeper = group.create_task(self._keep_alive(), name="keep-alive")
            last = await self._write_deltas()
        except DiptychError as error:
            if keeper is not None:
                keeper.cancel()
            return await self._fail(error, headers)
        keeper.cancel()
        await send_last(self._send, last)
        self._generation.mark("first_byte")
        self._generation.mark("done")
        return 200

    async def _first(self, headers: Headers, group: asyncio.TaskGroup) -> Routed:
        """Wait for token 1; keep the connection alive if that takes long."""
        first = group.create_task(self._outcome(), name="token 1")
        wait_s = self._settings.early_headers_s
        while not (await asyncio.wait({first}, timeout=wait_s))[0]:
            if not self.started:
                await self._start(headers)
            await self._write(KEEPALIVE)
            wait_s = self._settings.keepalive_s
        outcome = first.result()
        if isinstance(outcome, DiptychError):
            raise outcome
        return outcome

    async def _outcome(self) -> Routed | DiptychError:
        """An expected failure is a value here: it must not take the task group down."""
        try:
            return await self._generation.first()
        except DiptychError as error:
            return error

    async def _write_deltas(self) -> bytes:
        """Write all chunks but the last, which is returned with the end of the stream."""
        texts = self._texts
        is_marked = False
        async for delta in self._generation.deltas():
            block = self._blocks(delta)
            if not texts.num_open:
                return block + self._writer.end(texts.usage())
            if not block:
                continue
            await self._write(block)
            if self._has_text and not is_marked:
                self._generation.mark("first_byte")
                is_marked = True
        raise DiptychError("the generation ended without finishing every choice")

    def _blocks(self, delta: ChoiceDelta) -> bytes:
        """All chunks that this delta makes: role, text and finish leave in one write."""
        index = delta.index
        if self._texts.streams[index].finish is not None:
            return b""
        text = self._texts.push(delta)
        block = b""
        if text:
            self._has_text = True
            if self._writer.running_usage:
                block = self._writer.text_with_usage(index, text, self._texts.usage())
            else:
                block = self._writer.text(index, text)
        if self._roles_due and index in self._roles_due:
            self._roles_due.discard(index)
            block = self._writer.role(index) + block
        finish = self._texts.streams[index].finish
        if finish is not None:
            block += self._writer.finish(index, finish, self._texts.usage())
        return block

    async def _fail(self, error: DiptychError, headers: Headers) -> int:
        view = view_error(error)
        if self.started:
            await send_last(self._send, event(view.as_dict()))
        else:
            await respond(
                self._send, view.status, view.body(), headers + view.headers, content_type=JSON
            )
        return view.status

    async def _start(self, headers: Headers) -> None:
        self.started = True
        await start_response(self._send, 200, _STREAM_HEADERS + headers)

    async def _write(self, block: bytes) -> None:
        self._wrote_s = self._loop.time()
        await send_part(self._send, block)

    async def _keep_alive(self) -> None:
        """A comment whenever the stream has been silent for `keepalive_s`."""
        while True:
            silent_s = self._loop.time() - self._wrote_s
            if silent_s < self._settings.keepalive_s:
                await asyncio.sleep(self._settings.keepalive_s - silent_s)
            else:
                await self._write(KEEPALIVE)
