"""The runner of `engine: timed`: real schedulers, pool and links, and a clock instead of a model.

A step waits as long as its cost formula says and uses no CPU; its tokens are a pure function of
(prompt digest, seed, position), so a wrong, lost or repeated token shows. For load and routing
work, never evidence of correctness. Imports neither torch nor transformers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import ModelError
from cluster.model.identity import read_json, special_tokens
from cluster.model.step import StepBatch, StepResult

if TYPE_CHECKING:
    from pathlib import Path

_MASK_64 = (1 << 64) - 1
_MIN_PLAIN_TOKENS = 16  # fewer than this and every token that is not special serves


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """Coefficients of the cost formulas and the seed of the tokens."""

    prefill_a_s: float
    prefill_b_s_per_token: float
    prefill_c_s_per_token2: float
    decode_a_s: float
    decode_b_s_per_seq: float
    decode_c_s_per_ctx_token: float
    seed: int = 0


def step_cost_s(costs: TimedCosts, batch: StepBatch) -> float:
    """Return the seconds a step takes: its prefill part plus its decode part.

    A prompt of n tokens costs a + b*n + c*n^2 however it is cut: a chunk pays b for its tokens and
    c for the difference of the squares at its ends, and each step with a chunk pays one a. Decode
    rows cost a + b*B + c*sum(context).
    """
    cost = 0.0
    chunks = [piece for piece in batch.slices if not piece.is_decode]
    if chunks:
        squares = sum(piece.end**2 - piece.start**2 for piece in chunks)
        cost += costs.prefill_a_s + costs.prefill_b_s_per_token * batch.num_prefill_tokens
        cost += costs.prefill_c_s_per_token2 * squares
    if batch.num_decode_rows:
        cost += costs.decode_a_s + costs.decode_b_s_per_seq * batch.num_decode_rows
        cost += costs.decode_c_s_per_ctx_token * batch.num_context_tokens
    return cost


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def timed_token(vocabulary: tuple[int, ...], prompt_digest: int, seed: int, position: int) -> int:
    """Return output token `position` of a prompt, always one of `vocabulary`."""
    index = _mix(prompt_digest ^ _mix(seed ^ _mix(position))) % len(vocabulary)
    return vocabulary[index]


def timed_vocabulary(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids to answer with: plain ASCII words if there are enough, never special tokens.

    Plain words make every token visible text of its own, so a stream has as many chunks as tokens.

    Raises:
        ModelError: the tokenizer offers nothing to answer with.
    """
    model = read_json(path / "tokenizer.json").get("model") or {}
    special = set(special_tokens(path).values())
    vocab = model.get("vocab")
    named = vocab if isinstance(vocab, dict) else {}
    usable = {
        token_id: text
        for text, token_id in named.items()
        if token_id < vocab_size and token_id not in special
    }
    plain = [
        token_id
        for token_id, text in usable.items()
        if (word := text.lstrip("Ġ▁")).isascii() and word.isalpha()
    ]
    chosen = plain if len(plain) >= _MIN_PLAIN_TOKENS else list(usable)
    if not chosen:
        chosen = [token_id for token_id in range(vocab_size) if token_id not in special]
    if not chosen:
        msg = f"model {path} has no ordinary tokens for engine: timed"
        raise ModelError(msg)
    return tuple(sorted(chosen))


class TimedRunner:
    """Waits and answers; `stop` wakes a waiting step at once."""

    def __init__(self, costs: TimedCosts, vocabulary: tuple[int, ...]) -> None:
        """Keep the formulas and the ids to answer with."""
        self._costs = costs
        self._vocabulary = vocabulary
        self._stopped = threading.Event()

    def run(self, batch: StepBatch) -> StepResult:
        """Wait for the step's cost, then answer every slice that wants a token."""
        started_s = monotonic_s()
        tokens = tuple(
            None
            if piece.sample is None
            else timed_token(
                self._vocabulary,
                piece.sample.prompt_digest,
                self._costs.seed,
                piece.sample.position,
            )
            for piece in batch.slices
        )
        left_s = step_cost_s(self._costs, batch) - (monotonic_s() - started_s)
        if left_s > 0:
            self._stopped.wait(left_s)
        return StepResult(token_ids=tokens, duration_s=monotonic_s() - started_s)

    def stop(self) -> None:
        """End the current wait and all later ones; callable from any thread."""
        self._stopped.set()
