"""The journal: per choice, the tokens of the answer with their positions.

It appends only the next position, holds tokens that arrive early, drops repeats, and so makes one
sequence out of what several workers and attempts send. It is the only source of usage counts. A
choice never holds more than `max_tokens`, in order or early, whatever a worker sends. Pure: no
clock, no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.generation import ChoiceDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.types import FinishReason


class ChoiceJournal:
    """Tokens of one choice. `conflicts` counts repeats that named another token than before."""

    __slots__ = ("_early", "_end", "conflicts", "finish", "index", "max_tokens", "token_ids")

    def __init__(self, index: int, max_tokens: int) -> None:
        """Start an empty journal for choice `index`, bounded by `max_tokens`."""
        self.index = index
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.conflicts = 0
        self._early: dict[int, int] = {}  # position -> token, positions beyond the next one
        self._end: tuple[int, FinishReason] | None = None  # (number of tokens, reason) announced

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids)

    @property
    def num_early(self) -> int:
        """Tokens held until the gap before them closes."""
        return len(self._early)

    def record(
        self, position: int, token_ids: Sequence[int], finish: FinishReason | None = None
    ) -> ChoiceDelta | None:
        """Take tokens from output index `position` on; return what has become readable.

        Args:
            position: output index of the first token, 0-based.
            token_ids: consecutive tokens.
            finish: set when the choice ends with the last of them.

        Returns:
            The new in-order tokens, with the finish reason once all tokens before it are there;
            None when nothing new became readable. Nothing is ever readable after the finish.
        """
        if self.finish is not None:
            return None
        start = self.num_tokens
        for offset, token_id in enumerate(token_ids):
            self._take(position + offset, token_id)
        while self._early and (token := self._early.pop(self.num_tokens, None)) is not None:
            self.token_ids.append(token)
        if finish is not None and self._end is None:
            self._end = (position + len(token_ids), finish)
        if self._end is not None and self.num_tokens >= self._end[0]:
            return self._close(start)
        if self.num_tokens == start:
            return None
        return ChoiceDelta(self.index, tuple(self.token_ids[start:]))

    def stop(self, num_tokens: int, reason: FinishReason) -> None:
        """End the choice at `num_tokens`, dropping what lies beyond; idempotent."""
        del self.token_ids[num_tokens:]
        self._early.clear()
        self.finish = reason

    def _take(self, position: int, token_id: int) -> None:
        if position >= self.max_tokens or position < 0:
            return
        known = (
            self.token_ids[position] if position < self.num_tokens else self._early.get(position)
        )
        if known is not None:
            self.conflicts += known != token_id
        elif position == self.num_tokens:
            self.token_ids.append(token_id)
        else:
            self._early[position] = token_id

    def _close(self, start: int) -> ChoiceDelta:
        """Apply the announced end; tokens past it came from a worker that ran on."""
        assert self._end is not None
        num_tokens, reason = self._end
        self.stop(max(num_tokens, start), reason)
        return ChoiceDelta(self.index, tuple(self.token_ids[start:]), reason)


class Journal:
    """The choices of one client request."""

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        """Start one empty journal per choice, each bounded by `max_tokens`."""
        self.choices = [ChoiceJournal(index, max_tokens) for index in range(num_choices)]

    def __getitem__(self, index: int) -> ChoiceJournal:
        """Return the journal of one choice."""
        return self.choices[index]

    @property
    def num_tokens(self) -> int:
        """Completion tokens of the whole request: what usage reports."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)
