"""Draws depend on (seed, choice, position) alone and follow the distribution asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.model.sampler import sample, uniform
from cluster.model.step import SampleSpec
from cluster.types import SamplingParams

GREEDY = SamplingParams(max_tokens=99)
HOT = SamplingParams(max_tokens=99, temperature=1.0, seed=11)
LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()  # [vocab]


def spec(params: SamplingParams, position: int = 0) -> SampleSpec:
    return SampleSpec(params=params, position=position, prompt_digest=0)


def frequencies(params: SamplingParams, draws: int = 4000) -> list[float]:
    specs = [spec(params, position) for position in range(draws)]
    tokens = torch.tensor(sample(LOGITS.expand(draws, -1), specs))
    return [float((tokens == token).float().mean()) for token in range(len(LOGITS))]


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [9.0, 3.0, 9.0, 9.0]])
    for dtype in (torch.float32, torch.bfloat16):
        assert sample(logits.to(dtype), [spec(GREEDY), spec(GREEDY)]) == [1, 0]


def test_the_uniform_number_is_fixed_for_ever() -> None:
    # A change of these values would change the text of every seeded request.
    assert uniform(1, 0, 0) == 0.3035680343067586
    assert uniform(2**64 - 1, 3, 77) == 0.42975989213764265


def test_every_part_of_the_counter_matters() -> None:
    numbers = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**63)
        for choice in (0, 1)
        for position in (0, 1, 2)
    }
    assert len(numbers) == 18
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator) * 2
    params = [
        GREEDY,
        HOT,
        replace(HOT, top_p=0.7),
        replace(HOT, temperature=0.3, choice=1),
        replace(HOT, min_tokens=9, eos_token_ids=(3,)),
        replace(HOT, seed=2),
    ]
    specs = [spec(each, position) for position, each in enumerate(params)]
    together = sample(logits, specs)
    alone = [sample(logits[row : row + 1], [specs[row]])[0] for row in range(6)]
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    assert together == alone == backwards


def test_frequencies_follow_the_distribution() -> None:
    assert frequencies(HOT) == pytest.approx([0.5, 0.25, 0.15, 0.07, 0.03], abs=0.03)


def test_temperature_sharpens() -> None:
    squares = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]) ** 2
    expected = (squares / squares.sum()).tolist()
    assert frequencies(replace(HOT, temperature=0.5)) == pytest.approx(expected, abs=0.03)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    kept = frequencies(replace(HOT, top_p=0.8))
    assert kept == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0, 0.0], abs=0.03)
    assert kept[3] == kept[4] == 0.0


def test_a_tiny_top_p_or_temperature_is_greedy() -> None:
    assert frequencies(replace(HOT, top_p=1e-9), 50)[0] == 1.0
    assert frequencies(replace(HOT, temperature=1e-300), 50)[0] == 1.0
    assert frequencies(replace(HOT, temperature=1e-4), 50)[0] == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_removes_every_end_until_it_is_reached(temperature: float) -> None:
    params = replace(
        HOT,
        temperature=temperature,
        min_tokens=3,
        eos_token_ids=(0,),
        stop_token_ids=(1, 999),  # ids beyond the vocabulary are harmless
    )
    early = [spec(params, position) for position in (0, 1, 2)] * 100
    drawn = set(sample(LOGITS.expand(len(early), -1), early))
    assert not drawn & {0, 1}
    assert drawn <= ({2} if temperature == 0.0 else {2, 3, 4})
    later = [spec(replace(params, seed=seed), 3) for seed in range(100)]
    assert 0 in sample(LOGITS.expand(100, -1), later)


def test_the_callers_logits_are_left_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    before = logits.clone()
    sample(logits, [spec(replace(HOT, min_tokens=5, eos_token_ids=(0,)))] * 2)
    assert torch.equal(logits, before)
