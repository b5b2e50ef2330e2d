"""The JSON of successful answers: whole responses and the pieces of streamed ones.

Owns the OpenAI shapes and nothing else: `Head` is what every chunk of one response repeats. Pure
values to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.types import FinishReason
    from router.generation import Kind

to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """One response's identity; the same in all its chunks."""

    kind: Kind
    id: str
    created: int  # wall clock, seconds since the epoch
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one client request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One complete choice."""

    index: int
    text: str
    finish: FinishReason


def whole_response(head: Head, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """The body of a non-streamed answer."""
    is_chat = head.kind == "chat"
    return to_json(
        {
            "id": head.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "choices": [_chat_choice(c) if is_chat else _text_choice(c) for c in choices],
            "usage": usage.as_dict(),
        }
    )


def _chat_choice(choice: FinishedChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None,
        "finish_reason": choice.finish.value,
    }


def _text_choice(choice: FinishedChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish.value,
    }


def model_object(model: str, max_len: int, created: int) -> dict[str, Any]:
    """An entry of `/v1/models`."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "diptych",
        "max_model_len": max_len,
    }
