"""Server-sent events of one streamed answer, as bytes.

Promises: every block is `data: ...` or a comment, ended by two line feeds; the JSON around a text
is encoded once per stream and choice, so a token costs one escaped string and two copies. Knows
the OpenAI chunk shapes; knows no socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.http.responses import Head, Usage, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.types import FinishReason

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
_PLACE = "@@"  # where the text goes while the constant JSON around it is encoded


def event(value: Mapping[str, Any]) -> bytes:
    """One data block."""
    return b"data: " + to_json(value) + b"\n\n"


class SseWriter:
    """Encodes the chunks of one response."""

    def __init__(self, head: Head, *, with_usage: bool, running_usage: bool) -> None:
        """Prepare a stream.

        Args:
            head: what every chunk repeats.
            with_usage: the client asked for a usage chunk; other chunks then say `usage: null`.
            running_usage: every chunk carries the counts so far.
        """
        self._is_chat = head.kind == "chat"
        self._base: dict[str, Any] = {
            "id": head.id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._with_usage = with_usage
        self.running_usage = running_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # per choice: before and after the text

    def text(self, index: int, text: str) -> bytes:
        """A content chunk."""
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frame(index)
        return frame[0] + to_json(text) + frame[1]

    def text_with_usage(self, index: int, text: str, usage: Usage) -> bytes:
        """A content chunk with the counts so far."""
        return event(self._chunk(self._choice(index, text, None), usage))

    def role(self, index: int) -> bytes:
        """The chunk that opens a chat choice; a text completion has none."""
        if not self._is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(self._chunk(choice, None))

    def finish(self, index: int, reason: FinishReason, usage: Usage) -> bytes:
        """The last chunk of a choice."""
        running = usage if self.running_usage else None
        return event(self._chunk(self._choice(index, None, reason), running))

    def end(self, usage: Usage) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        if not self._with_usage:
            return DONE
        return event({**self._base, "choices": [], "usage": usage.as_dict()}) + DONE

    def _chunk(self, choice: Mapping[str, Any], usage: Usage | None) -> dict[str, Any]:
        chunk = {**self._base, "choices": [choice]}
        if usage is not None:
            chunk["usage"] = usage.as_dict()
        elif self._with_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, text: str | None, finish: FinishReason | None) -> dict[str, Any]:
        content: dict[str, Any]
        if self._is_chat:
            content = {"delta": {} if text is None else {"content": text}}
        else:
            content = {"text": text or ""}
        reason = None if finish is None else finish.value
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        block = event(self._chunk(self._choice(index, _PLACE, None), None))
        # The model's name is the client's and may hold the mark; the text's place comes last.
        before, _, after = block.rpartition(to_json(_PLACE))
        self._frames[index] = (before, after)
        return before, after
