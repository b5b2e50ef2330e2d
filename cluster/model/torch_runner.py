"""Executes steps with torch: one forward over the mixed batch, then the draws.

Owns the model and borrows the pool. The batch says everything else; no state of a sequence is
kept between steps. Called from the engine thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cluster.clock import monotonic_s
from cluster.model.attention import build_step
from cluster.model.sampler import sample
from cluster.model.step import StepBatch, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cluster.kv.pool import KvPool


class TorchRunner:
    """Runs steps of a model whose attention is `attention.paged_attention`."""

    def __init__(self, model: PreTrainedModel, pool: KvPool) -> None:
        """Borrow the pool; its layout must be the model's."""
        self._model = model
        self._pool = pool

    def stop(self) -> None:
        """Nothing to cut short: a step computes and is over soon."""

    def run(self, batch: StepBatch) -> StepResult:
        """Compute the batch, write its KV and draw a token for every slice that wants one."""
        started_s = monotonic_s()
        with torch.inference_mode():
            logits = self.logits(batch)  # [rows, vocab]
            specs = [piece.sample for piece in batch.slices if piece.sample is not None]
            drawn = iter(sample(logits, specs) if specs else ())
        tokens = tuple(None if piece.sample is None else next(drawn) for piece in batch.slices)
        return StepResult(token_ids=tokens, duration_s=monotonic_s() - started_s)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Forward the batch and return logits of each slice that wants a token, `[rows, vocab]`.

        A batch that wants none yields one unused row: the model needs something to project.
        """
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []  # packed positions whose logits are needed
        for piece in batch.slices:
            ids += piece.token_ids
            positions += range(piece.start, piece.end)
            if piece.sample is not None:
                wanted.append(len(ids) - 1)
        keep = torch.tensor(wanted or [len(ids) - 1])  # [rows]
        output = self._model(
            input_ids=torch.tensor([ids]),  # [1, T]
            position_ids=torch.tensor([positions]),  # [1, T]
            use_cache=False,
            logits_to_keep=keep,
            paged=build_step(self._pool, batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits
