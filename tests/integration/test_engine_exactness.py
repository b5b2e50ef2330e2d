"""Greedy fp32 tokens of the engine equal unmodified `transformers`, however the work is cut."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from cluster.model.identity import ModelFolder
from cluster.model.runner import LoadedEngine, load_engine
from tests.support.engine_driver import generate
from tests.support.tiny_models import FAMILIES, build_tiny, oracle_generate, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 16
CHUNK_TOKENS = 32
NEW_TOKENS = 32
LENGTHS = (
    1,
    BLOCK_SIZE - 1,
    BLOCK_SIZE,
    BLOCK_SIZE + 1,
    2 * BLOCK_SIZE,
    5 * BLOCK_SIZE + 3,
    5 * CHUNK_TOKENS,
)
PROMPTS = [random_prompt(length, seed=0) for length in (*LENGTHS, 40)]


def load(path: Path) -> LoadedEngine:
    return load_engine(
        ModelFolder(path=path, revision="test", content_hash="0" * 64),
        engine="torch",
        dtype="float32",
        max_len=None,
        block_size=BLOCK_SIZE,
        kv_blocks=96,
        num_threads=1,
        served_name="tiny",
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedEngine, list[list[int]]]:
    """A tiny model's engine, and the oracle's answer to every prompt."""
    path = build_tiny(request.param, tmp_path_factory.mktemp(request.param))
    answers, margins = zip(
        *(oracle_generate(path, prompt, NEW_TOKENS) for prompt in PROMPTS), strict=True
    )
    distinct = [len(set(answer)) for answer in answers]
    sys.stdout.write(
        f"{request.param}: distinct tokens {distinct}, smallest margin {min(margins):.1e}\n"
    )
    assert min(distinct) >= 8, "degenerate output proves nothing"
    assert min(margins) > 1e-4, "a tie would make equality a matter of rounding"
    return load(path), list(answers)


def test_each_prompt_alone(family: tuple[LoadedEngine, list[list[int]]]) -> None:
    engine, answers = family
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert generate(engine, [prompt], max_new_tokens=NEW_TOKENS) == [answer], len(prompt)


def test_each_prompt_alone_in_chunks(family: tuple[LoadedEngine, list[list[int]]]) -> None:
    engine, answers = family
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        output = generate(engine, [prompt], max_new_tokens=NEW_TOKENS, chunk_tokens=CHUNK_TOKENS)
        assert output == [answer], len(prompt)


@pytest.mark.parametrize("chunk_tokens", [7, CHUNK_TOKENS, 1 << 20])
def test_eight_prompts_at_once(
    family: tuple[LoadedEngine, list[list[int]]], chunk_tokens: int
) -> None:
    engine, answers = family
    outputs = generate(engine, PROMPTS, max_new_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens)
    assert outputs == answers


def test_layout_measured_on_the_model_equals_the_one_read_from_its_config(
    family: tuple[LoadedEngine, list[list[int]]], request: pytest.FixtureRequest
) -> None:
    from cluster.model.identity import kv_layout

    engine, _ = family
    config = engine.runner._model.config.to_dict()
    assert kv_layout(config, "float32", BLOCK_SIZE) == engine.layout


def test_a_moved_block_continues_on_another_worker(
    family: tuple[LoadedEngine, list[list[int]]],
) -> None:
    """Rows gathered from one pool and scattered into other rows of another decode alike."""
    import torch

    from cluster.kv.pool import KvPool
    from cluster.model.step import StepBatch
    from cluster.model.torch_runner import TorchRunner
    from cluster.types import SamplingParams
    from tests.support.engine_driver import Sequence, make_sequences

    engine, answers = family
    prompt, answer = PROMPTS[5], answers[5]
    params = SamplingParams(max_tokens=NEW_TOKENS)
    [source] = make_sequences(engine, [prompt], params)
    piece = source.next_slice(len(prompt))
    first = engine.runner.run(StepBatch((piece,))).token_ids[0]
    assert first == answer[0]

    pool = KvPool(engine.layout, 64)
    decode = TorchRunner(engine.runner._model, pool)
    used = source.table[: -(-len(prompt) // BLOCK_SIZE)]
    buffer = torch.empty(len(used), engine.layout.block_bytes, dtype=torch.uint8)
    engine.pool.gather(used, buffer)
    table = tuple(reversed(range(20, 20 + len(source.table))))
    pool.scatter(table[: len(used)], buffer)
    target = Sequence("moved", prompt, table, params, computed=len(prompt), output=[first])
    while len(target.output) < NEW_TOKENS:
        step = target.next_slice(1)
        target.output.append(decode.run(StepBatch((step,))).token_ids[0])
        target.computed = step.end
    assert target.output == answer
