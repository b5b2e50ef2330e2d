"""The HTTP front door: routes, middleware and the endpoints that generate.

Owns the FastAPI application. The generating endpoints are plain ASGI behind a router and nothing
else: no middleware that copies bodies or wraps streams stands between a token and the socket.
What a failure looks like is decided in `http_errors.py`, how an answer is written in `answer.py`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from cluster.clock import monotonic_s, wall_s
from cluster.errors import DiptychError
from router.http.answer import JSON, StreamedAnswer, Texts, WholeAnswer
from router.http.errors import CLIENT_CLOSED, INTERNAL_ERROR, ErrorView, view_error
from router.http.headers import decode_headers, parse_labels
from router.http.intake import take_in
from router.http.io import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    send_last,
    watch_for_disconnect,
)
from router.http.pages import Pages, on_http_error
from router.http.responses import Head
from router.http.settings import IngressObserver, OpenGate
from router.http.sse import SseWriter, event
from router.protocol import ChatBody, CompletionBody, parse_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from cluster.tokenizer import Tokenizer
    from router.generation import ClientRequest, FlowApi, Generation
    from router.http.settings import Gate, HttpSettings

log = logging.getLogger(__name__)

SEND_GRACE_S = 10.0  # beyond the request's deadline, for a client that reads slowly
EXPOSED_HEADERS = (
    "x-request-id",
    "x-diptych-request-id",
    "x-diptych-prefill",
    "x-diptych-decode",
    "x-diptych-cached-tokens",
    "x-diptych-ignored",
    "retry-after",
    "retry-after-ms",
)


class IngressApp(FastAPI):
    """FastAPI without the layers that this application does not use."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        """Serve one connection event; the stack is built on the first."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """CORS if asked for, then errors of the router, then the router."""
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return app


def build_app(
    flow: FlowApi,
    settings: HttpSettings,
    tokenizer: Tokenizer,
    *,
    gate: Gate | None = None,
    observer: IngressObserver | None = None,
) -> FastAPI:
    """Build the application of one ingress.

    Args:
        flow: the token layer.
        settings: plain values from the config.
        tokenizer: the served model's.
        gate: who may ask; None lets everyone in.
        observer: hears of answers and token gaps.
    """
    service = _Service(flow, settings, tokenizer, gate or OpenGate(), observer or IngressObserver())
    app = IngressApp(
        title="Diptych",
        version=settings.version,
        openapi_url=None,
        redirect_slashes=False,
    )
    pages = Pages(flow, settings, service.gate, created=int(wall_s()))
    app.router.routes[:] = [
        Route("/v1/chat/completions", _Endpoint(service, ChatBody), methods=["POST"]),
        Route("/v1/completions", _Endpoint(service, CompletionBody), methods=["POST"]),
        *pages.routes(),
    ]
    app.exception_handlers.clear()
    app.add_exception_handler(404, on_http_error)
    app.add_exception_handler(405, on_http_error)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
    return app


@dataclass(frozen=True, slots=True)
class _Service:
    """What all generating endpoints share."""

    flow: FlowApi
    settings: HttpSettings
    tokenizer: Tokenizer
    gate: Gate
    observer: IngressObserver


class _Endpoint:
    """`POST` of one kind of body: an ASGI application."""

    def __init__(self, service: _Service, model: type[ChatBody | CompletionBody]) -> None:
        self._service = service
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Task root of a request: however it ends, it is answered, counted and released."""
        exchange = _Exchange(self._service, self._model, receive, send)
        try:
            status = await exchange.run(decode_headers(scope["headers"]))
        except ClientGoneError:
            status = CLIENT_CLOSED
        except asyncio.CancelledError:
            self._service.observer.request_answered(CLIENT_CLOSED)
            raise
        self._service.observer.request_answered(status)


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        service: _Service,
        model: type[ChatBody | CompletionBody],
        receive: Receive,
        send: Send,
    ) -> None:
        self._service = service
        self._model = model
        self._receive = receive
        self._send = send
        self._id = str(uuid.uuid4())
        self._headers: Headers = (("x-request-id", self._id), ("x-diptych-request-id", self._id))
        self._answering: WholeAnswer | StreamedAnswer | None = None

    async def run(self, headers: dict[str, str]) -> int:
        """Serve; returns the status for the books."""
        try:
            request, body = await self._accept(headers)
            generation = self._service.flow.start(request)
        except DiptychError as error:
            return await self._refuse(view_error(error))
        except ClientGoneError:
            raise
        except Exception:  # task root: the request fails, the ingress goes on
            log.exception("request %s failed unexpectedly", self._id)
            return await self._refuse(INTERNAL_ERROR)
        try:
            return await self._answer(request, body, generation)
        except asyncio.CancelledError:  # how some servers tell that the client left
            generation.mark("disconnect")
            raise
        except Exception:  # task root, as above
            log.exception("request %s failed unexpectedly", self._id)
            return await self._give_up()
        finally:
            await generation.aclose()

    async def _accept(
        self, headers: dict[str, str]
    ) -> tuple[ClientRequest, ChatBody | CompletionBody]:
        service, settings = self._service, self._service.settings
        tenant = service.gate.tenant(headers.get("authorization"))
        labels = parse_labels(
            headers, request_timeout_s=settings.request_timeout_s, debug=settings.debug
        )
        if labels.request_id is not None:
            self._headers = (("x-request-id", labels.request_id), self._headers[1])
        raw = await read_body(
            self._receive, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        received_s = monotonic_s()
        body, ignored = parse_body(self._model, raw, settings.unknown_fields)
        if ignored:
            self._headers += (("x-diptych-ignored", _header_list(ignored)),)
        request = await take_in(
            body,
            labels,
            request_id=self._id,
            tenant=tenant,
            received_s=received_s,
            facts=service.flow.facts,
            tokenizer=service.tokenizer,
        )
        return request, body

    async def _answer(
        self,
        request: ClientRequest,
        body: ChatBody | CompletionBody,
        generation: Generation,
    ) -> int:
        """Write the answer while watching for the client to leave."""
        left_s = max(0.0, request.received_s + request.timeout_s - monotonic_s())
        status = CLIENT_CLOSED
        try:
            async with asyncio.timeout(left_s + SEND_GRACE_S), asyncio.TaskGroup() as group:
                watcher = group.create_task(watch_for_disconnect(self._receive), name="watch")
                status = await self._write(request, body, generation, group)
                watcher.cancel()
        except* ClientGoneError:
            generation.mark("disconnect")
        except* TimeoutError:
            log.warning("request %s: the client did not read its answer in time", self._id)
            generation.mark("disconnect")
        return status

    async def _write(
        self,
        request: ClientRequest,
        body: ChatBody | CompletionBody,
        generation: Generation,
        group: asyncio.TaskGroup,
    ) -> int:
        service = self._service
        head = _head(request, service.flow.facts.fingerprint)
        texts = Texts(request, body, generation, service.tokenizer, service.observer.token_gap)
        if not request.stream:
            whole = self._answering = WholeAnswer(generation, texts, head, self._send)
            return await whole.run(self._headers)
        writer = SseWriter(
            head,
            with_usage=body.stream_options.include_usage,
            running_usage=body.stream_options.continuous_usage_stats,
        )
        stream = StreamedAnswer(generation, texts, writer, self._send, service.settings)
        self._answering = stream
        return await stream.run(self._headers, group)

    async def _give_up(self) -> int:
        """After an unexpected failure: an error in whatever form is still possible."""
        if self._answering is None or not self._answering.started:
            return await self._refuse(INTERNAL_ERROR)
        await send_last(self._send, event(INTERNAL_ERROR.as_dict()))
        return INTERNAL_ERROR.status

    async def _refuse(self, view: ErrorView) -> int:
        headers = self._headers + view.headers
        await respond(self._send, view.status, view.body(), headers, content_type=JSON)
        return view.status


def _head(request: ClientRequest, fingerprint: str) -> Head:
    prefix = "chatcmpl" if request.kind == "chat" else "cmpl"
    return Head(
        kind=request.kind,
        id=f"{prefix}-{request.id.replace('-', '')}",
        created=int(wall_s()),
        model=request.model,
        system_fingerprint=f"fp_{fingerprint[:12]}",
    )


def _header_list(names: tuple[str, ...]) -> str:
    """Field names as one header value; whatever a header cannot carry is replaced."""
    return ", ".join(names).encode("ascii", "replace").decode().translate(_NO_CONTROLS)[:1_024]


_NO_CONTROLS = dict.fromkeys((*range(32), 127), "?")
