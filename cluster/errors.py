"""Every error this product raises on purpose.

    DiptychError
    |-- ConfigError                 bad config or command line          exit 2
    |-- ModelError                  model missing, unsupported, corrupt  exit 1
    |-- RequestError                the client's input is at fault       400
    |   |-- ContextLengthError      prompt + max_tokens cannot fit       400
    |   |-- UnsupportedError        a field we do not implement          400
    |   |-- ModelNotFoundError      unknown model name                   404
    |-- CapacityError (retryable)   no room now                          503 overloaded
    |   |-- NoDecodeWorkersError    no decode worker alive               503 no_decode_workers
    |-- DeadlineError               the request's deadline passed        503 deadline_exceeded
    |-- HandoffError  (retryable)   KV did not arrive                    503 handoff_failed
    |-- WorkerLostError (retryable) the worker holding a request died    503 worker_lost
    |-- WireError                   a peer broke the protocol
    |   |-- HandshakeError          HELLO refused: names the field
    |   |-- SessionClosedError (retryable)  the session ended
    |-- LedgerError                 an ownership rule of KV blocks was broken (a bug)

Class attributes tell the retry policy and the HTTP layer what they need: `retryable` says
whether another attempt may succeed, `code` is the machine-readable name clients see. HTTP
statuses are mapped in one place, `router/http/errors.py`; this module knows none.
"""

from __future__ import annotations

from typing import ClassVar


class DiptychError(Exception):
    """Root of the tree; `message` is one sentence fit for the user who caused or meets it."""

    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        """Keep `message` both as the exception's text and as an attribute."""
        super().__init__(message)
        self.message = message


class ConfigError(DiptychError):
    """The config file or the command line is wrong; the message names the YAML path."""

    code = "invalid_config"


class ModelError(DiptychError):
    """The model cannot be loaded or must not be served."""

    code = "model_error"


class RequestError(DiptychError):
    """The client's request is at fault; `param` names the offending field, if one is."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Store the field name and, when given, a more precise code than the class's."""
        super().__init__(message)
        self.param = param
        self.error_code = code or type(self).code


class ContextLengthError(RequestError):
    """Prompt plus requested output exceed what the model or the pools can ever hold."""

    code = "context_length_exceeded"


class UnsupportedError(RequestError):
    """A documented OpenAI field that this server refuses by name."""

    code = "unsupported_parameter"


class ModelNotFoundError(RequestError):
    """The request names a model this cluster does not serve."""

    code = "model_not_found"


class CapacityError(DiptychError):
    """There is no room now; `retry_after_s` is the best forecast of when there will be."""

    retryable = True
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        """Store the forecast, seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoDecodeWorkersError(CapacityError):
    """No decode worker is alive, so nothing can be generated."""

    code = "no_decode_workers"


class DeadlineError(DiptychError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class HandoffError(DiptychError):
    """KV blocks did not reach the decode worker intact."""

    retryable = True
    code = "handoff_failed"


class WorkerLostError(DiptychError):
    """The worker that held the request died or its session expired."""

    retryable = True
    code = "worker_lost"


class WireError(DiptychError):
    """A peer sent something the protocol does not allow; its session is closed."""

    code = "protocol_error"


class HandshakeError(WireError):
    """HELLO was refused; the message names the differing field and both values."""

    code = "handshake_refused"


class SessionClosedError(WireError):
    """The session ended while something still needed it."""

    retryable = True
    code = "session_closed"


class LedgerError(DiptychError):
    """A block changed owner against the rules: always a bug, never input."""

    code = "ledger_violation"
