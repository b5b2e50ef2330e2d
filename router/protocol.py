"""The request bodies of the OpenAI API, validated into plain values.

Owns the two pydantic models, their bounds and defaults, and the translation of a validation error
into one sentence that names the field. What a field outside these models means is decided in
`fields.py`; token ids come later, from the tokenizer. Never imports torch or HTTP code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from router.http.fields import (
    NO_EFFECT,
    Prompt,
    UnknownFields,
    check_names,
    decode_object,
    invalid,
    parse_messages,
    parse_prompt,
    parse_stop,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_COMPLETION_TOKENS = 16
_SEED_BITS = 64

TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**_SEED_BITS)]
Priority = Literal["priority", "default", "flex"]


class _Body(BaseModel):
    """No coercion between JSON types; unknown names are dealt with before validation."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class StreamOptions(_Body):
    """`stream_options`; obfuscation is accepted without effect."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationBody(_Body):
    """What chat and text completions have in common."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Seed | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(parse_stop)] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: Literal["auto", "priority", "default", "flex"] = "auto"
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, max_length=1_024)
    ] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def output_tokens(self) -> int | None:
        """The client's limit on each choice."""
        return self.max_tokens

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return 1

    @property
    def priority(self) -> Priority:
        """The priority class that `service_tier` names."""
        return "default" if self.service_tier == "auto" else self.service_tier

    @property
    def seed_u64(self) -> int | None:
        """The client's seed as 64 unsigned bits."""
        return None if self.seed is None else self.seed % (1 << _SEED_BITS)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(parse_prompt)]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[tuple[dict[str, str], ...], BeforeValidator(parse_messages)]
    max_completion_tokens: TokenCount | None = None

    @property
    def output_tokens(self) -> int | None:
        """The client's limit; the newer of the two names wins."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


_AnyBody = TypeVar("_AnyBody", bound=GenerationBody)


def parse_body(
    model: type[_AnyBody], body: bytes, unknown: UnknownFields
) -> tuple[_AnyBody, tuple[str, ...]]:
    """Validate a request body.

    Args:
        model: which endpoint's fields to expect.
        body: the raw HTTP body.
        unknown: what to do with fields nobody handles.

    Returns:
        The validated body and the paths of the fields that were ignored.

    Raises:
        RequestError: not JSON, or a field is wrong; names the field.
        UnsupportedError: a field this server refuses by name.
    """
    fields = decode_object(body)
    ignored = check_names(fields, model.model_fields.keys() | NO_EFFECT, unknown)
    options = fields.get("stream_options")
    if isinstance(options, dict):
        ignored += check_names(
            options, StreamOptions.model_fields.keys(), unknown, "stream_options."
        )
    try:
        parsed = model.model_validate(fields)
    except ValidationError as error:
        _explain(error.errors(include_url=False)[0])
    _check_together(parsed, has_options=options is not None)
    return parsed, ignored


def _check_together(body: GenerationBody, *, has_options: bool) -> None:
    """Rules about several fields."""
    if has_options and not body.stream:
        invalid("'stream_options' is only allowed with 'stream': true", "stream_options")
    limit = body.output_tokens
    if limit is not None and body.min_tokens > limit:
        invalid(f"min_tokens is {body.min_tokens}, more than the limit of {limit}", "min_tokens")


def _explain(detail: ErrorDetails) -> NoReturn:
    """Raise the RequestError for pydantic's first complaint."""
    param = _path(detail["loc"])
    if detail["type"] == "missing":
        invalid(f"you must provide '{param}'", param, "missing_required_parameter")
    kind = "invalid_type" if detail["type"].endswith("_type") else "invalid_value"
    invalid(f"Invalid value for '{param}': {detail['msg']}", param, kind)


def _path(location: tuple[Any, ...]) -> str:
    """`("a", 0, "b")` as `a[0].b`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path
