"""Drives a runner by hand, without scheduler or ledger; each sequence has rows of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.model.step import SampleSpec, StepBatch, StepSlice
from cluster.types import AttemptKey, BlockId, RequestId, SamplingParams

if TYPE_CHECKING:
    from cluster.model.runner import LoadedEngine


@dataclass(slots=True)
class Sequence:
    """A prompt on its way through the engine."""

    name: str
    prompt: list[int]
    table: tuple[BlockId, ...]
    params: SamplingParams
    computed: int = 0  # tokens whose KV is in the pool
    output: list[int] = field(default_factory=list)

    def next_slice(self, chunk_tokens: int) -> StepSlice:
        """The sequence's share of the next step."""
        tokens = [*self.prompt, *self.output]
        end = min(len(tokens), self.computed + chunk_tokens)
        spec = SampleSpec(self.params, position=len(self.output), prompt_digest=0)
        return StepSlice(
            key=AttemptKey(RequestId(self.name), 1),
            token_ids=tuple(tokens[self.computed : end]),
            start=self.computed,
            block_ids=self.table,
            sample=spec if end == len(tokens) else None,
        )


def make_sequences(
    engine: LoadedEngine, prompts: list[list[int]], params: SamplingParams
) -> list[Sequence]:
    """Give each prompt rows scattered over the whole pool."""
    block_size = engine.layout.block_size
    rows = [BlockId(row) for row in range(engine.pool.num_blocks)]
    random.Random(7).shuffle(rows)
    sequences = []
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + params.max_tokens) // block_size)
        table, rows = tuple(rows[:count]), rows[count:]
        assert len(table) == count, "the test's pool is too small"
        sequences.append(Sequence(str(index), prompt, table, params))
    return sequences


def generate(
    engine: LoadedEngine,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    chunk_tokens: int = 1 << 20,
    params: SamplingParams | None = None,
) -> list[list[int]]:
    """Run all prompts together, each step mixing chunks and decode rows; returns the outputs."""
    params = params or SamplingParams(max_tokens=max_new_tokens)
    sequences = make_sequences(engine, prompts, params)
    while running := [s for s in sequences if len(s.output) < max_new_tokens]:
        slices = [sequence.next_slice(chunk_tokens) for sequence in running]
        result = engine.runner.run(StepBatch(slices=tuple(slices)))
        for sequence, piece, token in zip(running, slices, result.token_ids, strict=True):
            assert (token is None) == (piece.sample is None)
            sequence.computed = piece.end
            if token is not None:
                sequence.output.append(token)
    return [sequence.output for sequence in sequences]
