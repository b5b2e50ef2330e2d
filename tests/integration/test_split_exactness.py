"""Split output equals aggregated output equals unmodified `transformers`, token for token, in fp32.

Workers are plain processes joined by real gloo links. Prompt lengths surround the block and chunk
boundaries; every prompt runs cold, warm, and in a crowd of eight.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from cluster.config import read_environment
from cluster.model.resolve import resolve_model
from cluster.tokenizer import Tokenizer
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.tiny_models import FAMILIES, build_tiny, oracle_generate, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
BLOCK = 16
CHUNK = 32
NEW_TOKENS = 32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3, 5 * CHUNK)
POOL = {"kv_blocks": 256, "chunk_tokens": CHUNK}
SETTINGS = {"block_size": BLOCK, "pools": {"prefill": POOL, "decode": POOL}}


PROSE = """The lighthouse keeper kept two books. In the first he wrote what the harbour master
wanted to know: wind, visibility, the names of ships and the hour at which they passed. In the
second, bound in green cloth and hidden behind the oil cans, he wrote what nobody had asked him.
On the third of March a whale surfaced so close to the rock that its breath fogged the lamp room
windows. In April the supply boat brought a letter from his sister, who had moved to a city with
trams, and who asked whether he remembered the orchard, the broken gate, and the dog that followed
strangers home. He remembered all of it. He answered on a page torn from the first book, because
the paper was better, and reported calm seas for that day although a gale had blown since noon.
When an inspector came in June he noticed the missing page, counted the lines, weighed the oil,
and then, after a long look at the horizon, asked only whether there was coffee."""
# where in the prose each length's prompt starts: places whose answers are varied
SMOLLM2_STARTS = {1: 0, 15: 4, 16: 30, 17: 15, 32: 16, 83: 20, 160: 24}
Prompts = dict[int, list[int]]  # by length


def _tiny(family: str, tmp_path: Path) -> tuple[Path, Prompts]:
    folder = build_tiny(family, tmp_path / family)
    return folder, {length: random_prompt(length, seed=1) for length in LENGTHS}


def _smollm2(tmp_path: Path) -> tuple[Path, Prompts]:
    folder = resolve_model(SMOLLM2, None, read_environment().cache_dir).path
    tokenizer = Tokenizer.load(folder)
    token_ids = tokenizer.encode(PROSE, add_special_tokens=False)
    prompts = {n: token_ids[start : start + n] for n, start in SMOLLM2_STARTS.items()}
    assert all(len(prompt) == length for length, prompt in prompts.items())
    return folder, prompts


def _oracles(folder: Path, prompts: Prompts) -> Prompts:
    """Oracle output of each length's prompt; checks that the comparison can fail."""
    expected, margins, distinct = {}, [], []
    for length, prompt in prompts.items():
        tokens, margin = oracle_generate(folder, prompt, NEW_TOKENS)
        expected[length] = tokens
        margins.append(margin)
        distinct.append(len(set(tokens)))
    sys.stdout.write(
        f"{folder.name}: smallest margin {min(margins):.2e}, distinct tokens {min(distinct)}\n"
    )
    assert min(margins) > 1e-4
    assert min(distinct) >= 8
    return expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [*FAMILIES, SMOLLM2])
async def test_split_and_aggregated_equal_transformers(family: str, tmp_path: Path):
    folder, prompts = _smollm2(tmp_path) if family == SMOLLM2 else _tiny(family, tmp_path)
    expected = _oracles(folder, prompts)
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
    crowd = [LENGTHS[i % len(LENGTHS)] for i in range(8)]
    answers = await asyncio.gather(
        *(cluster.generate(prompts[length], NEW_TOKENS) for length in crowd)
    )
    for length, answer in zip(crowd, answers, strict=True):
        assert answer.tokens == expected[length], (length, "crowd")


def _check_path(workers: list[dict]) -> None:
    """The prompts were computed by prefill alone, and their KV went over the link."""
    by_role = {worker["role"]: worker for worker in workers}
    assert by_role["prefill"]["prefill_tokens"] > 0
    assert by_role["decode"]["prefill_tokens"] == 0
    assert by_role["prefill"]["handoff_bytes_sent"] > 0
    assert by_role["prefill"]["handoff_bytes_sent"] == by_role["decode"]["handoff_bytes_received"]
