"""What the benches ask for: prompts of token ids, made from a seed.

Every setup gets the same prompts in the same repetition, and no prompt comes twice in a run, so
that a prefix cache helps exactly where a workload means it to. Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Ordinary ids of any byte-level vocabulary of 32,000 entries or more; specials lie outside.
FIRST_ID = 300
LAST_ID = 30_000


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed burst: all requests start at the same moment."""

    name: str
    num_requests: int
    prompt_tokens: int  # of each request alone
    output_tokens: int
    prefix_tokens: int = 0  # in front of every prompt, the same for all requests

    @property
    def total_output_tokens(self) -> int:
        """Tokens the whole burst generates."""
        return self.num_requests * self.output_tokens

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of one request."""
        return self.prefix_tokens + self.prompt_tokens + self.output_tokens

    def prompts(self, seed: str) -> list[list[int]]:
        """One list of ids a request; equal seeds give equal prompts."""
        source = random.Random(f"{self.name}/{seed}")
        prefix = token_ids(source, self.prefix_tokens)
        return [prefix + token_ids(source, self.prompt_tokens) for _ in range(self.num_requests)]


def token_ids(source: random.Random, num_tokens: int) -> list[int]:
    """Random ordinary ids."""
    return [source.randrange(FIRST_ID, LAST_ID) for _ in range(num_tokens)]


BURSTS = (
    Workload("1 x 128 in / 128 out", 1, 128, 128),
    Workload("16 x 512 in / 64 out", 16, 512, 64),
    Workload("32 x 1024 shared + 64 in / 32 out", 32, 64, 32, prefix_tokens=1024),
)

QUICK_BURSTS = (
    Workload("1 x 32 in / 16 out", 1, 32, 16),
    Workload("4 x 64 in / 8 out", 4, 64, 8),
    Workload("4 x 128 shared + 16 in / 8 out", 4, 16, 8, prefix_tokens=128),
)
