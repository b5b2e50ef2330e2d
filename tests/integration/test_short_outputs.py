"""Outputs of one, two and three tokens: exact counts, no KV moved for an end at token 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_models import build_tiny, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 16 * 3 * 2 * 2 * 12 * 4  # tokens, layers, K and V, heads, head size, fp32


@pytest.mark.timeout(120)
async def test_s47_short_outputs_are_exact_and_token_one_alone_moves_no_kv(tmp_path: Path):
    folder = build_tiny("llama", tmp_path / "llama")
    prompt = random_prompt(40, seed=3)
    async with mini_cluster(folder, tmp_path) as cluster:
        longer = await cluster.generate(prompt, 8)
        for mode in ("split", "local"):
            answer = await cluster.generate(prompt, 1, mode=mode)
            assert (answer.tokens, answer.finish) == (longer.tokens[:1], "length"), mode
            first_stops = await cluster.generate(
                prompt, 8, mode=mode, stop_token_ids=(longer.tokens[0],)
            )
            assert (first_stops.tokens, first_stops.finish) == (longer.tokens[:1], "stop"), mode
        for count in (2, 3):
            for mode in ("split", "local"):
                answer = await cluster.generate(prompt, count, mode=mode)
                assert (answer.tokens, answer.finish) == (longer.tokens[:count], "length")
        await cluster.until_quiet()
        # The probe's block, the prompt's three, then only its partial one for counts 2 and 3.
        await cluster.until_sent((1 + 3 + 2) * BLOCK_BYTES)
