"""The routes that generate nothing: liveness, models, metrics and what debugging may see.

All answers are small JSON or text, errors in OpenAI's shape. Liveness, readiness, version and
metrics need no key; debug routes exist only when they are enabled and then want the admin's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from cluster.errors import DiptychError, ModelNotFoundError, RequestError
from router.http.errors import INTERNAL_ERROR, ErrorView, view_error
from router.http.responses import model_object, to_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from router.generation import FlowApi
    from router.http.settings import Gate, HttpSettings

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """Handlers of the routes; each is a plain function of the request."""

    def __init__(self, flow: FlowApi, settings: HttpSettings, gate: Gate, *, created: int) -> None:
        """`created` is the wall-clock second that model objects show."""
        self._flow = flow
        self._settings = settings
        self._gate = gate
        self._created = created

    def routes(self) -> list[Route]:
        """All routes of this module."""
        pages: dict[str, Callable[[Request], Response]] = {
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }
        if self._settings.debug:
            pages |= {
                "/debug/status": self.debug_status,
                "/debug/requests": self.debug_requests,
                "/debug/requests/{request_id}": self.debug_request,
            }
        return [Route(path, _guarded(page), methods=["GET"]) for path, page in pages.items()]

    def health(self, request: Request) -> Response:
        """Answer while the process lives."""
        return _json({"status": "ok"})

    def ready(self, request: Request) -> Response:
        """Whether requests would be served; degraded still is."""
        readiness = self._flow.ready()
        status = 503 if readiness.status == "unready" else 200
        return _json({"status": readiness.status, "reasons": list(readiness.reasons)}, status)

    def version(self, request: Request) -> Response:
        """The product's version."""
        return _json({"version": self._settings.version})

    def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._flow.render_metrics(), headers={"content-type": METRICS_TYPE})

    def models(self, request: Request) -> Response:
        """The one served model, as a list."""
        self._gate.tenant(request.headers.get("authorization"))
        return _json({"object": "list", "data": [self._model_object()]})

    def model(self, request: Request) -> Response:
        """The served model by its name, which may hold slashes."""
        self._gate.tenant(request.headers.get("authorization"))
        name = request.path_params["model"]
        if name != self._flow.facts.served_name:
            raise ModelNotFoundError(f"the model '{name[:256]}' does not exist", param="model")
        return _json(self._model_object())

    def debug_status(self, request: Request) -> Response:
        """The object of `status --json`."""
        self._gate.check_admin(request.headers.get("authorization"))
        return _json(self._flow.status())

    def debug_requests(self, request: Request) -> Response:
        """Records of recent requests, newest first."""
        self._gate.check_admin(request.headers.get("authorization"))
        return _json(self._flow.requests())

    def debug_request(self, request: Request) -> Response:
        """One record by our id."""
        self._gate.check_admin(request.headers.get("authorization"))
        record = self._flow.request(request.path_params["request_id"])
        if record is None:
            raise RequestError("no such request is remembered", code="not_found")
        return _json(record)

    def _model_object(self) -> dict[str, Any]:
        facts = self._flow.facts
        return model_object(facts.served_name, facts.max_len, self._created)


async def on_http_error(request: Request, error: Exception) -> Response:
    """A path or method that does not exist, in OpenAI's shape."""
    status = getattr(error, "status_code", 404)
    where = f"{request.method} {request.url.path}"
    headers = dict(getattr(error, "headers", None) or {})
    code = "method_not_allowed" if status == 405 else "not_found"
    message = f"{where} is not part of this API"
    view = ErrorView(status, message, "invalid_request_error", code)
    return Response(view.body(), status, headers, media_type="application/json")


def _guarded(page: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Make a route of a page; its typed errors become responses."""

    async def handler(request: Request) -> Response:
        try:
            return page(request)
        except DiptychError as error:
            view = view_error(error)
        except Exception:  # task root: the page fails, the ingress goes on
            log.exception("%s failed unexpectedly", request.url.path)
            view = INTERNAL_ERROR
        headers = dict(view.headers)
        return Response(view.body(), view.status, headers, media_type="application/json")

    return handler


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
