"""Greedy fp32 tokens of the engine equal unmodified `transformers`, however the work is cut."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import read_environment
from cluster.kv.pool import KvPool
from cluster.model.identity import ModelFolder, kv_layout
from cluster.model.resolve import resolve_model
from cluster.model.runner import LoadedEngine, load_engine
from cluster.model.step import StepBatch
from cluster.model.torch_runner import TorchRunner
from cluster.types import SamplingParams
from tests.support.engine_driver import Sequence, generate, make_sequences
from tests.support.tiny_models import (
    FAMILIES,
    ODD_FAMILIES,
    build_tiny,
    oracle_generate,
    random_prompt,
)

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


def load(path: Path, dtype: str = "float32") -> LoadedEngine:
    return load_engine(
        ModelFolder(path=path, revision="test", content_hash="0" * 64),
        engine="torch",
        dtype=dtype,
        max_len=None,
        block_size=BLOCK_SIZE,
        kv_blocks=96,
        num_threads=1,
        served_name="tiny",
    )


@pytest.fixture(scope="module", params=(*FAMILIES, *ODD_FAMILIES))
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
    engine, _ = family
    config = engine.runner._model.config.to_dict()
    assert kv_layout(config, "float32", BLOCK_SIZE) == engine.layout


def test_a_moved_block_continues_on_another_worker(
    family: tuple[LoadedEngine, list[list[int]]],
) -> None:
    """Rows gathered from one pool and scattered into other rows of another decode alike."""
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


# ---- the real small model -----------------------------------------------------------------------

QUESTIONS = ("What is the capital of France?", "Explain how rain forms.")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, list[list[int]]]:
    """The packaged model (converted once into the cache) and two chat prompts."""
    from transformers import AutoTokenizer

    path = resolve_model("smollm2-135m-instruct", None, read_environment().cache_dir).path
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    return path, [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]


@pytest.mark.timeout(300)  # the first run ever converts the model
def test_smollm2_in_float32(smollm2: tuple[Path, list[list[int]]]) -> None:
    path, prompts = smollm2
    answers, margins = zip(*(oracle_generate(path, ids, 16) for ids in prompts), strict=True)
    assert min(margins) > 1e-4
    engine = load(path)
    for chunk_tokens in (16, 1 << 20):
        outputs = generate(engine, prompts, max_new_tokens=16, chunk_tokens=chunk_tokens)
        assert outputs == list(answers), chunk_tokens


@pytest.mark.timeout(300)
def test_smollm2_logits_in_bfloat16(smollm2: tuple[Path, list[list[int]]]) -> None:
    """Repacked bf16 layers agree with `transformers` within bf16 rounding."""
    path, prompts = smollm2
    engine = load(path, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.bfloat16)
    sequences = make_sequences(engine, prompts, SamplingParams(max_tokens=1))
    batch = StepBatch(tuple(sequence.next_slice(1 << 20) for sequence in sequences))
    with torch.inference_mode():
        logits = engine.runner.logits(batch).float()  # [2, vocab]
        for row, prompt in enumerate(prompts):
            expected = model(torch.tensor([prompt])).logits[0, -1].float()
            scale = float(expected.abs().max())
            assert float((logits[row] - expected).abs().max()) < 0.05 * scale
