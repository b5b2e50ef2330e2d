"""Request headers that mean something here, validated into one value.

Labels are the client's words: they are kept, shown and echoed, never used as keys. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from router.http.fields import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from router.generation import Mode

MAX_LABEL_CHARS = 128
_LABEL = re.compile(r"[\x20-\x7e]{1,128}")
_DECIMAL = re.compile(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MODES = ("auto", "split", "local")


@dataclass(frozen=True, slots=True)
class Labels:
    """What a client said about its request outside the body."""

    request_id: str | None
    session: str | None
    timeout_s: float
    traceparent: str | None
    mode: Mode


def decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header names, lower case, to values; the first of several lines counts."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def parse_labels(headers: Mapping[str, str], *, request_timeout_s: float, debug: bool) -> Labels:
    """Validate the headers.

    Args:
        headers: as from `decode_headers`.
        request_timeout_s: default and upper bound of the timeout.
        debug: whether x-diptych-mode is honoured.

    Raises:
        RequestError: names the header.
    """
    mode = headers.get("x-diptych-mode", "auto") if debug else "auto"
    if mode not in _MODES:
        invalid(f"x-diptych-mode must be one of {', '.join(_MODES)}", "x-diptych-mode")
    traceparent = headers.get("traceparent")
    if traceparent is not None and not _TRACEPARENT.match(traceparent):
        traceparent = None  # W3C Trace Context, section 4.3: an invalid one is ignored
    return Labels(
        request_id=_label(headers, "x-request-id"),
        session=_label(headers, "x-diptych-session"),
        timeout_s=min(request_timeout_s, _timeout_s(headers, request_timeout_s)),
        traceparent=traceparent,
        mode=cast("Mode", mode),
    )


def _label(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name, "")
    if not value:
        return None
    if not _LABEL.fullmatch(value):
        invalid(f"{name} must be at most {MAX_LABEL_CHARS} printable ASCII characters", name)
    return value


def _timeout_s(headers: Mapping[str, str], default_s: float) -> float:
    name = "x-diptych-timeout-s"
    value = headers.get(name)
    if value is None:
        return default_s
    seconds = float(value) if _DECIMAL.fullmatch(value.strip()) else 0.0
    if seconds <= 0:
        invalid(f"{name} must be a decimal number of seconds above 0, not '{value[:32]}'", name)
    return seconds
