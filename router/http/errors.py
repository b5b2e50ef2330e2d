"""From an error to what an HTTP client sees: the one place where statuses are decided.

Owns the status, type, code and retry hints of every failure, in OpenAI's error shape. Pure: it
returns values; the ingress writes them, as a response before the first byte and as an event after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import (
    CapacityError,
    DeadlineError,
    DiptychError,
    HandoffError,
    ModelNotFoundError,
    RequestError,
    SessionClosedError,
    WorkerLostError,
)
from router.http.responses import to_json

DEFAULT_RETRY_S = 1.0
CLIENT_CLOSED = 499  # never sent: how a disconnect is counted

_STATUS_BY_CODE = {
    "invalid_api_key": 401,
    "rate_limit_exceeded": 429,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
}
_UNAVAILABLE = (CapacityError, DeadlineError, HandoffError, WorkerLostError, SessionClosedError)


@dataclass(frozen=True, slots=True)
class ErrorView:
    """One failure, ready to be written."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of a body or of an error event."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """The JSON text."""
        return to_json(self.as_dict())


def view_error(error: DiptychError) -> ErrorView:
    """Map an error of the tree; what is nobody's input and no known outage is a 500."""
    if isinstance(error, RequestError):
        return _client_error(error)
    code = "worker_lost" if isinstance(error, SessionClosedError) else error.code
    if code in _STATUS_BY_CODE:  # limits that are raised as capacity errors
        status = _STATUS_BY_CODE[code]
        return ErrorView(status, error.message, "rate_limit_error", code, None, _retry(error))
    if isinstance(error, _UNAVAILABLE):
        return ErrorView(503, error.message, "server_error", code, None, _retry(error))
    return ErrorView(500, error.message, "server_error", "internal_error")


INTERNAL_ERROR = ErrorView(500, "the server failed unexpectedly", "server_error", "internal_error")


def _client_error(error: RequestError) -> ErrorView:
    code = error.error_code
    default = 404 if isinstance(error, ModelNotFoundError) else 400
    status = _STATUS_BY_CODE.get(code, default)
    headers = (("www-authenticate", "Bearer"),) if status == 401 else ()
    if status in (408, 413):  # the rest of the body is not wanted on this connection
        headers = (("connection", "close"),)
    return ErrorView(status, error.message, "invalid_request_error", code, error.param, headers)


def _retry(error: DiptychError) -> tuple[tuple[str, str], ...]:
    """`Retry-After` in whole seconds, rounded up, and the exact wait in milliseconds."""
    seconds = error.retry_after_s if isinstance(error, CapacityError) else DEFAULT_RETRY_S
    milliseconds = max(1, math.ceil(seconds * 1_000))
    return (
        ("retry-after", str(max(1, math.ceil(seconds)))),
        ("retry-after-ms", str(milliseconds)),
    )
