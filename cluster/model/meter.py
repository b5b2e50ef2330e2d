"""What an engine learns about itself by running: counters and smoothed rates.

Written only by the engine thread, read by the event loop for snapshots: every field is replaced
as a whole, so a reader sees an old value or a new one, never half of one.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.2  # weight of the newest step in the moving averages


@dataclass(slots=True)
class EngineMeter:
    """Counters of one process life. Rates start at 0, meaning not yet known."""

    prefill_tokens: int = 0  # prompt tokens computed, recomputation included
    generated_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0

    def record(
        self, *, num_tokens: int, prefill_tokens: int, generated_tokens: int, duration_s: float
    ) -> None:
        """Account one finished step of `num_tokens` tokens, `prefill_tokens` of them prompt."""
        self.prefill_tokens += prefill_tokens
        self.generated_tokens += generated_tokens
        self.steps += 1
        self.busy_s += duration_s
        if prefill_tokens == 0:
            self.decode_step_s = _smooth(self.decode_step_s, duration_s)
        elif prefill_tokens == num_tokens and duration_s > 0:
            self.prefill_tokens_per_s = _smooth(
                self.prefill_tokens_per_s, prefill_tokens / duration_s
            )


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
