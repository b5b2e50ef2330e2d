"""Split output equals aggregated output equals unmodified `transformers`, token for token, in fp32.

Workers are plain processes joined by real gloo links. Every prompt runs cold, warm, and in a crowd
of eight.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.exactness import (
    BLOCK,
    CHUNK,
    CROWD,
    NEW_TOKENS,
    SMOLLM2,
    Prompts,
    model_and_prompts,
    oracles,
)
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.tiny_models import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

POOL = {"kv_blocks": 256, "chunk_tokens": CHUNK}
SETTINGS = {"block_size": BLOCK, "pools": {"prefill": POOL, "decode": POOL}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [*FAMILIES, SMOLLM2])
async def test_split_and_aggregated_equal_transformers(family: str, tmp_path: Path):
    folder, prompts = model_and_prompts(family, tmp_path)
    expected = oracles(folder, prompts)
    for num_prefill in (1, 0):
        async with mini_cluster(folder, tmp_path, prefill=num_prefill, **SETTINGS) as cluster:
            await _compare(cluster, prompts, expected)
            await cluster.until_quiet()
            if num_prefill:
                _check_path(cluster.status_workers())


async def _compare(cluster: MiniCluster, prompts: Prompts, expected: Prompts) -> None:
    """Each prompt cold and warm, then a crowd of eight at once."""
    for temperature in ("cold", "warm"):
        for length, prompt in prompts.items():
            answer = await cluster.generate(prompt, NEW_TOKENS)
            assert answer.tokens == expected[length], (length, temperature)
            assert answer.finish == "length"
            if temperature == "warm":
                assert answer.record.cached_tokens == (length - 1) // BLOCK * BLOCK
    answers = await asyncio.gather(
        *(cluster.generate(prompts[length], NEW_TOKENS) for length in CROWD)
    )
    for length, answer in zip(CROWD, answers, strict=True):
        assert answer.tokens == expected[length], (length, "crowd")


def _check_path(workers: list[dict]) -> None:
    """The prompts were computed by prefill alone, and their KV went over the link."""
    by_role = {worker["role"]: worker for worker in workers}
    assert by_role["prefill"]["prefill_tokens"] > 0
    assert by_role["decode"]["prefill_tokens"] == 0
    assert by_role["prefill"]["handoff_bytes_sent"] > 0
    assert by_role["prefill"]["handoff_bytes_sent"] == by_role["decode"]["handoff_bytes_received"]
