"""One engine step as values: what the schedulers ask for and what a runner answers.

A step is a batch of slices, each being either a prefill chunk (many tokens) or a decode row (one
token). Both roles build the same values, and every runner (torch or timed) takes them, so the
schedulers never see a tensor. The one rule that ends a generation lives here too, because both
schedulers must apply it alike. Pure: never imports torch, asyncio or ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.types import AttemptKey, BlockId, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token that follows a slice."""

    params: SamplingParams
    position: int  # output index of the token to draw, 0-based; part of the draw's counter
    prompt_digest: int  # 64-bit digest of the prompt, for `engine: timed`


@dataclass(frozen=True, slots=True)
class StepSlice:
    """New tokens of one sequence; the KV of positions 0..start-1 is already in the pool."""

    key: AttemptKey
    token_ids: tuple[int, ...]  # new tokens, at least one
    start: int  # absolute position of token_ids[0]
    block_ids: tuple[BlockId, ...]  # block table, covers at least `end` tokens
    sample: SampleSpec | None  # None: no logits wanted (a chunk that does not end the prompt)

    @property
    def end(self) -> int:
        """Tokens whose KV is in the pool once the step is done."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One token that yields the next one: a decode row, not a prefill chunk."""
        return len(self.token_ids) == 1 and self.sample is not None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything one step computes, in the order the scheduler chose."""

    slices: tuple[StepSlice, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of all slices."""
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def num_decode_rows(self) -> int:
        """Slices that are decode rows."""
        return sum(piece.is_decode for piece in self.slices)

    @property
    def num_prefill_tokens(self) -> int:
        """New tokens of the slices that are prefill chunks."""
        return self.num_tokens - self.num_decode_rows

    @property
    def num_context_tokens(self) -> int:
        """Positions the decode rows attend to, themselves included."""
        return sum(piece.end for piece in self.slices if piece.is_decode)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yielded; KV of every new token is in the pool."""

    token_ids: tuple[int | None, ...]  # aligned with the slices; None where `sample` was None
    duration_s: float


class Runner(Protocol):
    """Executes steps, always called from the engine thread."""

    def run(self, batch: StepBatch) -> StepResult:
        """Compute `batch`, write its KV into the pool and draw the wanted tokens."""
        ...

    def stop(self) -> None:
        """Cut a step that only waits short; callable from any thread, once, at the end."""
        ...


def finish_reason(params: SamplingParams, num_output: int, token_id: int) -> FinishReason | None:
    """Say whether a generation ends with `token_id`, its `num_output`-th output token (1-based).

    EOS and stop tokens win over the length limit when both apply. While fewer than `min_tokens`
    tokens exist the sampler masks them, so such a draw cannot end a generation here either.
    """
    if num_output > params.min_tokens and (
        token_id in params.eos_token_ids or token_id in params.stop_token_ids
    ):
        return FinishReason.STOP
    if num_output >= params.max_tokens:
        return FinishReason.LENGTH
    return None
