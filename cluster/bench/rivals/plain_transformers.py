"""`transformers` as a user without a server would run it: `generate` on one static batch.

Reads a job as JSON from stdin (model folder, dtype, threads, bursts of prompts) and writes one JSON
line for each burst: the seconds from its start to each step's token. All prompts of a burst have
the same length, so the batch needs no padding; nothing is cached between bursts.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

WARM_UP_TOKENS = 4


class StepTimes(StoppingCriteria):  # type: ignore[misc]  # transformers is not followed by mypy
    """Notes when each step's tokens exist; stops nothing."""

    def __init__(self) -> None:
        """Start the clock."""
        self.started_s = time.monotonic()
        self.token_s: list[float] = []

    def __call__(
        self,
        input_ids: torch.Tensor,  # [rows, tokens]
        scores: torch.Tensor,  # [rows, vocab]
        **_: Any,  # noqa: ANN401  # whatever generate passes on
    ) -> torch.Tensor:
        """Called once a step."""
        self.token_s.append(time.monotonic() - self.started_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # [rows]


def generate(model: Any, prompts: list[list[int]], num_tokens: int) -> list[float]:  # noqa: ANN401
    """Run one batch; returns when each of its steps was done, seconds from the start."""
    ids = torch.tensor(prompts)  # [rows, prompt tokens]
    greedy = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    times = StepTimes()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=greedy,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    return times.token_s


def main() -> None:
    """Load, warm up, run every burst of the job."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=job["dtype"])
    model.generation_config = GenerationConfig()  # without an end-of-text token nothing stops early
    generate(model, [job["bursts"][0]["prompts"][0]], WARM_UP_TOKENS)
    for burst in job["bursts"]:
        token_s = generate(model, burst["prompts"], burst["output_tokens"])
        sys.stdout.write(json.dumps(token_s) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
