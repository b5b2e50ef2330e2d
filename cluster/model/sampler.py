"""Draws the next tokens from a step's logits.

Greedy rows are one batched argmax. A sampled row is temperature, filters, then inversion of the
cumulative distribution at a uniform number that depends on (seed, choice, position) alone: a
counter-based generator, so the draw is the same on any worker, in any batch and after any restart.
Filters work row-wise on logits, in the order of `FILTERS`; a new sampling field is a new filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cluster.types import SamplingParams

if TYPE_CHECKING:
    from cluster.model.step import SampleSpec

MIN_TEMPERATURE = 1e-5  # below it float32 logits overflow, and the draw is greedy anyway
_MASK_64 = (1 << 64) - 1

Filter = Callable[[torch.Tensor, SamplingParams], torch.Tensor]  # logits [vocab] -> [vocab]


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the draw's number in [0, 1): Philox4x64 (Salmon et al., SC 2011) at a fixed counter.

    Args:
        seed: 64-bit seed of the request; key word 0.
        choice: index among `n`; key word 1.
        position: output index of the token; the counter.
    """
    key = np.array([seed & _MASK_64, choice & _MASK_64], dtype=np.uint64)
    counter = np.array([position & _MASK_64, 0, 0, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def _top_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Keep the fewest most probable tokens whose mass reaches `top_p`."""
    if params.top_p >= 1.0:
        return logits
    ordered, order = torch.sort(logits, descending=True, stable=True)
    mass = torch.softmax(ordered, dim=-1).cumsum(-1)
    # A token goes when the tokens before it already reach top_p; the first always stays.
    drop = mass - torch.softmax(ordered, dim=-1) >= params.top_p
    drop[0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), float("-inf"))


FILTERS: tuple[Filter, ...] = (_top_p,)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def _mask_ends(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Remove EOS and stop tokens from rows that have not reached `min_tokens`."""
    rows: list[int] = []
    columns: list[int] = []
    for row, spec in enumerate(specs):
        if spec.position < spec.params.min_tokens:
            ends = {*spec.params.eos_token_ids, *spec.params.stop_token_ids}
            known = [token for token in ends if 0 <= token < logits.shape[1]]
            rows += [row] * len(known)
            columns += known
    if not rows:
        return logits
    logits = logits.clone()
    logits[rows, columns] = float("-inf")
    return logits


def _draw(logits: torch.Tensor, spec: SampleSpec) -> int:
    """Draw one token from `logits`, `[vocab]`."""
    logits = logits.float() / spec.params.temperature
    for apply in FILTERS:
        logits = apply(logits, spec.params)
    # float64: the running sum of a large vocabulary must not lose the tail.
    cumulative = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(-1)
    point = uniform(spec.params.seed, spec.params.choice, spec.position) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, point, right=True))
    if token < len(cumulative):
        return token
    return int(logits.argmax())  # rounding put the point past the end


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Draw one token for each row.

    Args:
        logits: `[len(specs), vocab]`, any float type.
        specs: how to draw, aligned with the rows.

    Returns:
        Token ids, aligned with the rows. A row's draw does not depend on the other rows.
    """
    logits = _mask_ends(logits, specs)
    # max, not argmax: the same first index on ties, and several times faster on bf16
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    for row, spec in enumerate(specs):
        if not _is_greedy(spec.params):
            tokens[row] = _draw(logits[row], spec)
    return tokens
