"""The edge between the text layer (HTTP, SSE, detokeniser) and the token layer (flow).

Owns the values and protocols both sides are written against: `ClientRequest` goes down, tokens
come up as `ChoiceDelta`, and `FlowApi` is all the ingress may ask of the flow. Pure values: no
HTTP, no torch, no ray, so either side can be tested against a scripted other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.types import FinishReason, ModelFacts, SamplingParams

Kind = Literal["chat", "completion"]
Mode = Literal["auto", "split", "local"]
Moment = Literal["first_byte", "done", "disconnect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One HTTP request after validation and tokenisation.

    Choice `i` of the answer is choice `i % n` of prompt `i // n`. `sampling` is common to all
    choices; the flow fills in `choice` and, per choice, the seed.
    """

    id: str  # our uuid, the header x-diptych-request-id
    client_request_id: str  # the label of x-request-id: the client's, or ours
    kind: Kind
    model: str
    prompts: tuple[tuple[int, ...], ...]  # token ids, at least one prompt, none empty
    n: int
    sampling: SamplingParams
    seed_given: bool
    stream: bool
    timeout_s: float  # counted from received_s
    mode: Mode = "auto"
    tenant: str = "default"
    session: str | None = None
    traceparent: str | None = None
    priority: str = "default"
    received_s: float  # monotonic clock, when the request had been fully read
    tokenize_s: float
    max_tokens_given: bool = True  # False: sampling.max_tokens is only "the rest of the context"

    @property
    def num_choices(self) -> int:
        """How many choices the answer has."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New tokens of one choice: in order, never repeated; `finish` comes with the last ones."""

    index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the first choice went, known with its token 1; feeds the response headers."""

    prefill: str | None  # None: the decode worker computed the prompt itself
    decode: str | None  # None: token 1 was the last, so no decode worker was asked
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """What `/ready` answers."""

    status: Literal["ready", "degraded", "unready"]
    reasons: tuple[str, ...] = field(default=())


class Generation(Protocol):
    """One running client request."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from a prefix cache, over all prompts; final once all are done."""

    async def first(self) -> Routed:
        """Wait for token 1 of some choice. Raises DiptychError if none will come."""

    def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Yield every token from token 1 on; ends when all choices have finished.

        Raises DiptychError on a failure. The reader may stop early, once it has seen every
        choice finish or has stopped it itself.
        """

    def stop_choice(self, index: int, reason: FinishReason, num_tokens: int) -> None:
        """End a choice whose text is complete: a stop string was found.

        `num_tokens` is how many of its tokens the answer counts, the one that completed the stop
        string included; tokens past it are cancelled or dropped. Also called when the choice had
        finished by itself on those tokens: the text layer's verdict is the one to record.
        """

    async def aclose(self) -> None:
        """Cancel whatever still runs and finalise the record. Idempotent."""

    def mark(self, name: Moment) -> None:
        """Note when something happened on the client's side; only the first of a name counts."""


class FlowApi(Protocol):
    """Everything the ingress asks of the token layer."""

    @property
    def facts(self) -> ModelFacts:
        """The served model."""

    def start(self, request: ClientRequest) -> Generation:
        """Begin a request; raises ContextLengthError and its like before any compute."""

    def ready(self) -> Readiness:
        """Whether requests would be served now, and why not fully."""

    def status(self) -> dict[str, Any]:
        """The object of `status --json`."""

    def requests(self) -> list[dict[str, Any]]:
        """Records of recent requests, newest first."""

    def request(self, request_id: str) -> dict[str, Any] | None:
        """The record of one request by our id."""

    def render_metrics(self) -> str:
        """The Prometheus text exposition."""
