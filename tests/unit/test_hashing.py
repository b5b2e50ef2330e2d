"""Block hashes: deterministic, full blocks only, distinct for every distinct field."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cluster.kv.hashing import chain_hashes, chain_seed, extend_chain, prompt_digest

_SEED = chain_seed("f00d", "")
_TOKENS = st.lists(st.integers(0, 2**31), max_size=40)


def test_values_never_change_between_releases():
    hashes = chain_hashes(range(8), block_size=4, seed=chain_seed("f00d", "tenant", "lora"))
    assert [value.hex()[:16] for value in hashes] == ["ec0caf1da79a0c57", "22a867e6bd7cbbbb"]
    assert prompt_digest([1, 2, 3]) == 13041116711478803063


def test_only_full_blocks_have_a_hash():
    for num_tokens, num_hashes in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        hashes = chain_hashes([7] * num_tokens, block_size=4, seed=_SEED)
        assert len(hashes) == num_hashes


@given(_TOKENS, st.integers(1, 7))
def test_extending_a_chain_equals_hashing_it_whole(tokens, block_size):
    parent = _SEED
    extended = []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        parent = extend_chain(parent, tuple(tokens[start : start + block_size]))
        extended.append(parent)
    assert chain_hashes(tokens, block_size=block_size, seed=_SEED) == extended


@given(_TOKENS, _TOKENS)
def test_equal_hash_means_equal_history(left, right):
    left_hashes = chain_hashes(left, block_size=3, seed=_SEED)
    right_hashes = chain_hashes(right, block_size=3, seed=_SEED)
    for index, (mine, other) in enumerate(zip(left_hashes, right_hashes, strict=False)):
        end = 3 * (index + 1)
        assert (mine == other) == (left[:end] == right[:end])


def test_equal_blocks_at_different_places_differ():
    first, second = chain_hashes([5, 5, 5, 5], block_size=2, seed=_SEED)
    assert first != second


def test_seeds_of_different_owners_differ():
    # Includes fields that concatenate to the same text.
    fields = [("ab", "c", ""), ("a", "bc", ""), ("abc", "", ""), ("ab", "", "c"), ("", "abc", "")]
    seeds = [chain_seed(*triple) for triple in fields]
    assert all(mine != other for mine, other in itertools.combinations(seeds, 2))


def test_digest_fits_64_bits_and_sees_every_token():
    digests = [prompt_digest(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1])]
    assert all(0 <= digest < 2**64 for digest in digests)
    assert len(set(digests)) == len(digests)
