"""What a request's record says about cached tokens and time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.mini_cluster import make_request, mini_cluster
from tests.support.tiny_models import build_tiny, random_prompt

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(120)
async def test_s50_cached_tokens_are_counted_over_all_prompts_once_each(tmp_path: Path):
    folder = build_tiny("llama", tmp_path / "llama")
    prompts = tuple(tuple(random_prompt(length, seed=length)) for length in (40, 20, 5))
    async with mini_cluster(folder, tmp_path, engine="timed") as cluster:
        for expected in (0, 32 + 16 + 0):
            request = replace(make_request(prompts[0], 4), prompts=prompts)
            generation = cluster.flow.start(request)
            async for _ in generation.deltas():
                pass
            await generation.aclose()
            assert generation.cached_tokens == expected
            names = [phase.name for phase in generation.record.phases]
            assert names.count("route") == len(prompts)
        await cluster.until_quiet()
