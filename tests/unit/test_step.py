"""Counting the work of a step, and the rule that ends a generation."""

from __future__ import annotations

import pytest

from cluster.model.step import SampleSpec, StepBatch, StepSlice, finish_reason
from cluster.types import AttemptKey, BlockId, FinishReason, RequestId, SamplingParams


def piece(tokens: int, start: int, *, sampled: bool) -> StepSlice:
    return StepSlice(
        key=AttemptKey(RequestId("r"), 1),
        token_ids=tuple(range(tokens)),
        start=start,
        block_ids=(BlockId(0),),
        sample=SampleSpec(SamplingParams(max_tokens=4), 0, 0) if sampled else None,
    )


def test_a_mixed_batch_counts_decode_rows_and_prefill_tokens_apart() -> None:
    batch = StepBatch(
        (
            piece(1, 40, sampled=True),
            piece(1, 9, sampled=True),
            piece(8, 0, sampled=False),
            piece(1, 8, sampled=False),  # a chunk of one token that does not end its prompt
            piece(5, 16, sampled=True),
        )
    )
    assert batch.num_tokens == 16
    assert batch.num_decode_rows == 2
    assert batch.num_prefill_tokens == 14
    assert batch.num_context_tokens == 41 + 10


@pytest.mark.parametrize(
    ("num_output", "token", "expected"),
    [
        (1, 7, None),  # ordinary token
        (3, 2, FinishReason.STOP),  # EOS
        (3, 5, FinishReason.STOP),  # stop token
        (4, 7, FinishReason.LENGTH),
        (4, 2, FinishReason.STOP),  # both apply: the token wins
        (2, 2, None),  # the sampler may not draw it yet, so it does not count either
    ],
)
def test_finish_reason(num_output: int, token: int, expected: FinishReason | None) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2, eos_token_ids=(2,), stop_token_ids=(5,))
    assert finish_reason(params, num_output, token) == expected


def test_ignore_eos_is_an_empty_tuple() -> None:
    assert finish_reason(SamplingParams(max_tokens=9), 1, 2) is None
