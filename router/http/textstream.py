"""From a choice's tokens to the text a client may see.

Owns incremental detokenisation and stop strings, for one choice each. Promises: what was handed
out is never taken back, a character is never split, the concatenation is the same however tokens
are grouped, and a stop string is found across token boundaries. Text that may still turn out to
be the start of a stop string is held back. Pure: no I/O, no clock.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from cluster.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.tokenizer import Pieces, Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns tokens into text, keeping incomplete characters back."""

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token."""

    def flush(self) -> str:
        """What an incomplete character at the end looks like."""


class PieceDetokenizer:
    """Joins the tokens' bytes and decodes UTF-8 incrementally: exact, and a dict lookup a token."""

    __slots__ = ("_decoder", "_pending", "_pieces", "_texts")

    def __init__(self, pieces: Pieces) -> None:
        """Start at a character boundary."""
        self._pieces = pieces
        self._texts = pieces.texts
        self._decoder = _UTF8("replace")
        self._pending = False  # bytes of an incomplete character wait in the decoder

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token."""
        if not self._pending:
            text = self._texts.get(token_id) or self._pieces.text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._pieces.raw(token_id))
        self._pending = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """One replacement character per incomplete sequence, as a whole decode would give."""
        self._pending = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders that look at neighbours (WordPiece and others): decodes a short window.

    New text is what a window of recent tokens decodes to beyond what its older part decodes to;
    the window moves on whenever text came out. A trailing replacement character means that the
    last character may be incomplete, and is waited for.
    """

    __slots__ = ("_known", "_skip", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        """Continue after `context`, the last few tokens of the prompt."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context)  # tokens still needed to decode the next one correctly
        self._known = len(self._window)  # how many of them have been handed out as text

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token."""
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._known]
        self._known = len(self._window)
        return text

    def flush(self) -> str:
        """Whatever the held tokens decode to now."""
        text = self._new_text()
        self._known = len(self._window)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._window[: self._known])
        return self._decode(self._window)[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


_CONTEXT_TOKENS = 6  # of the prompt, for window decoders


def detokenizer(
    tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
) -> Detokenizer:
    """Return the cheapest exact detokeniser for text that continues `prompt`."""
    pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
    if pieces is not None:
        return PieceDetokenizer(pieces)
    return WindowDetokenizer(
        tokenizer, skip_special_tokens=skip_special_tokens, context=prompt[-_CONTEXT_TOKENS:]
    )


class StopStrings:
    """Finds the first stop string to be completed, character by character.

    Of several, the one that ends first wins, then the one that starts first, so the result does
    not depend on how the text was cut into tokens.
    """

    __slots__ = ("_buffer", "_include", "_sent", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """Look for `stops`, none empty; `include` keeps the found one in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._buffer = ""  # a suffix of the text that may be the start of a stop string
        self._sent = 0  # characters of the buffer already handed out (only with `include`)

    def feed(self, text: str, *, armed: bool) -> tuple[str, bool]:
        """Add text; return what may be shown now and whether a stop string ended it.

        Unless `armed`, a stop string completed by this text is ordinary text.
        """
        old = len(self._buffer)
        self._buffer += text
        if armed and (found := self._find(old)) is not None:
            start, end = found
            shown = self._buffer[self._sent : end if self._include else max(start, self._sent)]
            self._buffer, self._sent = "", 0
            return shown, True
        held = self._partial()
        cut = len(self._buffer) - held
        until = len(self._buffer) if self._include else cut
        shown = self._buffer[self._sent : until]
        self._buffer = self._buffer[cut:]
        self._sent = held if self._include else 0
        return shown, False

    def flush(self) -> str:
        """The text held back, now that nothing will complete it."""
        shown = self._buffer[self._sent :]
        self._buffer, self._sent = "", 0
        return shown

    def _find(self, old: int) -> tuple[int, int] | None:
        """(start, end) of the first stop string that ends beyond `old` characters."""
        best: tuple[int, int] | None = None  # (end, start), smallest wins
        for stop in self._stops:
            start = self._buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[0])

    def _partial(self) -> int:
        """Length of the longest suffix of the buffer that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._buffer)), longest, -1):
                if self._buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextStream:
    """One choice's text. `finish` and `num_tokens` are what the answer reports."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "finish",
        "num_tokens",
        "stopped_by_string",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Start an empty text.

        Args:
            detokenizer: fresh, for this choice alone.
            stops: stop strings; they may be completed by token min_tokens + 1 at the earliest.
            min_tokens: as in SamplingParams.
            include_stop: keep the stop string, or the text of a stop token, in the output.
        """
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.num_tokens = 0  # up to and including the token that completed a stop string
        self.finish: FinishReason | None = None
        self.stopped_by_string = False

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Add tokens and, with the last of them, the engine's finish; return the new text.

        A choice that has ended takes nothing more.
        """
        if self.finish is not None:
            return ""
        if self._stops is None and finish is None:
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return self._detokenizer.feed(token_ids[0])
            return "".join(map(self._detokenizer.feed, token_ids))
        return self._push_slowly(token_ids, finish)

    def _push_slowly(self, token_ids: Sequence[int], finish: FinishReason | None) -> str:
        shown: list[str] = []
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if finish is FinishReason.STOP and position == last and not self._include_stop:
                break  # the token that stopped it is counted but is not part of the text
            text, stopped = self._scan(self._detokenizer.feed(token_id))
            shown.append(text)
            if stopped:
                self.finish = FinishReason.STOP
                self.stopped_by_string = True
                return "".join(shown)
        if finish is not None:
            self.finish = finish
            text, self.stopped_by_string = self._scan(self._detokenizer.flush())
            shown.append(text)
            if self.stopped_by_string:
                self.finish = FinishReason.STOP
            elif self._stops is not None:
                shown.append(self._stops.flush())
        return "".join(shown)

    def _scan(self, text: str) -> tuple[str, bool]:
        if self._stops is None:
            return text, False
        return self._stops.feed(text, armed=self.num_tokens > self._min_tokens)
