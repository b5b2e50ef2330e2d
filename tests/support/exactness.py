"""Prompts and oracle outputs for the exactness tests: lengths around block and chunk boundaries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cluster.config import read_environment
from cluster.model.resolve import resolve_model
from cluster.tokenizer import Tokenizer
from tests.support.tiny_models import build_tiny, oracle_generate, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
BLOCK = 16
CHUNK = 32
NEW_TOKENS = 32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3, 5 * CHUNK)
CROWD = tuple(LENGTHS[i % len(LENGTHS)] for i in range(8))
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


def model_and_prompts(family: str, tmp_path: Path) -> tuple[Path, Prompts]:
    """A servable folder and one prompt of each length."""
    if family != SMOLLM2:
        folder = build_tiny(family, tmp_path / family)
        return folder, {length: random_prompt(length, seed=1) for length in LENGTHS}
    folder = resolve_model(SMOLLM2, None, read_environment().cache_dir).path
    token_ids = Tokenizer.load(folder).encode(PROSE, add_special_tokens=False)
    prompts = {n: token_ids[start : start + n] for n, start in SMOLLM2_STARTS.items()}
    assert all(len(prompt) == length for length, prompt in prompts.items())
    return folder, prompts


def oracles(folder: Path, prompts: Prompts) -> Prompts:
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
