"""The same equality through HTTP and Ray: what clients read is the oracle's text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from openai import AsyncOpenAI

from cluster.tokenizer import Tokenizer
from tests.support.cluster_process import running_cluster
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

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster_process import ClusterProcess


async def _ask(client: AsyncOpenAI, prompt: list[int], mode: str) -> str:
    """One streamed completion of exactly NEW_TOKENS tokens."""
    stream = await client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
        extra_headers={"x-diptych-mode": mode},
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def _compare(
    cluster: ClusterProcess, prompts: Prompts, texts: dict[int, str], modes: tuple[str, ...]
) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        for mode in modes:
            for length, prompt in prompts.items():
                assert await _ask(client, prompt, mode) == texts[length], (length, mode)
        answers = await asyncio.gather(*(_ask(client, prompts[n], "auto") for n in CROWD))
        assert answers == [texts[length] for length in CROWD]


@pytest.mark.parametrize("family", ["llama", SMOLLM2])
async def test_http_answers_equal_transformers(family: str, tmp_path: Path):
    folder, prompts = model_and_prompts(family, tmp_path)
    tokenizer = Tokenizer.load(folder)
    texts = {
        length: tokenizer.decode(tokens, skip_special_tokens=False)
        for length, tokens in oracles(folder, prompts).items()
    }
    cold_and_warm = ("auto", "auto")
    for mode, asked in (("disaggregated", cold_and_warm), ("aggregated", ("local",))):
        with running_cluster(
            mode=mode,
            block_size=BLOCK,
            model__id=str(folder),
            model__served_name="m",
            model__dtype="float32",
            pools__prefill__chunk_tokens=CHUNK,
            pools__decode__chunk_tokens=CHUNK,
        ) as cluster:
            await _compare(cluster, prompts, texts, asked)
