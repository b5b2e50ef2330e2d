"""What the HTTP layer is built from: plain values, an observer, the gate that knows API keys.

Owns `HttpSettings`, what metrics hear of answers, and the two gates. Keys are compared by their
SHA-256, so a key itself is never kept. No HTTP code here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from cluster.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from router.http.fields import UnknownFields


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Plain values of the `http`, `debug` and timeout sections of the config."""

    keepalive_s: float = 15.0  # longest silence of an open stream
    early_headers_s: float = 15.0  # a streaming request gets its 200 after this wait at the latest
    request_timeout_s: float = 600.0  # default and upper bound of x-diptych-timeout-s
    cors_origins: tuple[str, ...] = ()
    unknown_fields: UnknownFields = "refuse"
    debug: bool = False
    version: str = "0"
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 30.0  # for a client to send its whole request


class IngressObserver:
    """What metrics want to hear from the HTTP layer; the default hears nothing."""

    def request_answered(self, code: int) -> None:
        """A generation request ended with this status; 499: the client left first."""

    def token_gap(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` arrived together, `gap_s` after the one before them."""


class Gate(Protocol):
    """Decides who may ask; raises RequestError with code `invalid_api_key`."""

    def tenant(self, authorization: str | None) -> str:
        """The tenant that the Authorization header's key belongs to."""

    def check_admin(self, authorization: str | None) -> None:
        """Let only the administrator pass."""


class OpenGate:
    """Without keys configured everyone is the default tenant, and an administrator."""

    def tenant(self, authorization: str | None) -> str:
        """The default tenant, whatever the header says."""
        return "default"

    def check_admin(self, authorization: str | None) -> None:
        """Let everyone pass."""


class KeyGate:
    """Bearer keys, known by their hashes."""

    def __init__(self, tenants: Mapping[str, str], admins: Collection[str]) -> None:
        """`tenants` maps the hex SHA-256 of a key to its tenant; `admins` holds such hashes."""
        self._tenants = dict(tenants)
        self._admins = frozenset(admins)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of a known key."""
        tenant = self._tenants.get(_key_hash(authorization))
        if tenant is None:
            _refuse()
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Let only an administrator's key pass."""
        if _key_hash(authorization) not in self._admins:
            _refuse()


def _key_hash(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        _refuse()
    return hashlib.sha256(key.strip().encode()).hexdigest()


def _refuse() -> NoReturn:
    raise RequestError(
        "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
    )
