"""The timed engine: cost formulas, tokens as a function of their place, waiting without a CPU."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest

from cluster.model.step import SampleSpec, StepBatch, StepSlice
from cluster.model.timed import (
    TimedCosts,
    TimedRunner,
    step_cost_s,
    timed_token,
    timed_vocabulary,
)
from cluster.types import AttemptKey, BlockId, RequestId, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

COSTS = TimedCosts(
    prefill_a_s=1.0,
    prefill_b_s_per_token=0.1,
    prefill_c_s_per_token2=0.01,
    decode_a_s=2.0,
    decode_b_s_per_seq=0.2,
    decode_c_s_per_ctx_token=0.001,
    seed=3,
)
WORDS = tuple(range(100, 150))


def piece(tokens: int, start: int, *, position: int | None, digest: int = 5) -> StepSlice:
    params = SamplingParams(max_tokens=9)
    return StepSlice(
        key=AttemptKey(RequestId("r"), 1),
        token_ids=(0,) * tokens,
        start=start,
        block_ids=(BlockId(0),),
        sample=None if position is None else SampleSpec(params, position, digest),
    )


def test_a_whole_prompt_costs_a_plus_bn_plus_cn2() -> None:
    batch = StepBatch((piece(20, 0, position=0),))
    assert step_cost_s(COSTS, batch) == pytest.approx(1.0 + 0.1 * 20 + 0.01 * 400)


def test_chunks_of_a_prompt_add_up_to_it_but_for_a() -> None:
    chunks = [piece(8, 0, position=None), piece(8, 8, position=None), piece(4, 16, position=0)]
    total = sum(step_cost_s(COSTS, StepBatch((chunk,))) for chunk in chunks)
    assert total == pytest.approx(3 * 1.0 + 0.1 * 20 + 0.01 * 400)


def test_decode_costs_a_plus_b_rows_plus_c_context() -> None:
    batch = StepBatch((piece(1, 99, position=1), piece(1, 49, position=1)))
    assert step_cost_s(COSTS, batch) == pytest.approx(2.0 + 0.2 * 2 + 0.001 * 150)


def test_a_mixed_step_costs_both() -> None:
    chunk, row = piece(20, 0, position=0), piece(1, 99, position=1)
    both = step_cost_s(COSTS, StepBatch((row, chunk)))
    apart = step_cost_s(COSTS, StepBatch((row,))) + step_cost_s(COSTS, StepBatch((chunk,)))
    assert both == pytest.approx(apart)


def test_tokens_differ_by_prompt_seed_and_position() -> None:
    tokens = [timed_token(WORDS, digest, 0, i) for digest in (1, 2) for i in range(200)]
    assert set(tokens) == set(WORDS)
    assert tokens[:200] != tokens[200:]
    assert tokens[:200] != [timed_token(WORDS, 1, 1, i) for i in range(200)]
    assert tokens[:200] == [timed_token(WORDS, 1, 0, i) for i in range(200)]


def test_only_slices_that_want_a_token_get_one() -> None:
    free = TimedCosts(0, 0, 0, 0, 0, 0)
    batch = StepBatch((piece(1, 9, position=4), piece(8, 0, position=None)))
    tokens = TimedRunner(free, WORDS).run(batch).token_ids
    assert tokens == (timed_token(WORDS, 5, 0, 4), None)


def test_a_step_waits_for_its_cost_and_uses_no_cpu() -> None:
    runner = TimedRunner(TimedCosts(0, 0, 0, 0.2, 0, 0), WORDS)
    cpu_s = time.thread_time()
    result = runner.run(StepBatch((piece(1, 9, position=1),)))
    assert result.duration_s >= 0.199
    assert time.thread_time() - cpu_s < 0.05


def test_stop_ends_a_waiting_step() -> None:
    runner = TimedRunner(TimedCosts(0, 0, 0, 3600, 0, 0), WORDS)
    waiting = threading.Thread(target=runner.run, args=(StepBatch((piece(1, 9, position=1),)),))
    waiting.start()
    runner.stop()
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_vocabulary_is_plain_words_without_special_tokens(tmp_path: Path) -> None:
    words = {f"Ġ{letter}x": index for index, letter in enumerate("abcdefghijklmnopqrst")}
    vocab = {**words, "<e>": 20, "!": 21, "Ã": 22, "beyond": 99}
    added = [{"id": 20, "content": "<e>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocab}, "added_tokens": added})
    )
    assert timed_vocabulary(tmp_path, 50) == tuple(range(20))


def test_without_enough_words_every_ordinary_token_serves(tmp_path: Path) -> None:
    added = [{"id": 1, "content": "<e>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "<e>": 1, "!": 2}}, "added_tokens": added})
    )
    assert timed_vocabulary(tmp_path, 3) == (0, 2)
