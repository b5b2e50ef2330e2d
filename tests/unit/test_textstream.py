"""Text streaming: grouping of tokens never matters, nothing is split, leaked or taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types import FinishReason
from router.http.textstream import TextStream, detokenizer
from tests.support.toy_tokenizers import byte_level, sentencepiece_like, word_piece

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece_like()


def text_stream(tokenizer=BYTE_LEVEL, *, prompt=(), skip_special_tokens=True, **options):
    source = detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return TextStream(source, **options)


def grouped(ids, cuts):
    """Split ids at the given positions."""
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[a:b] for a, b in pairwise(edges)] or [ids]


def run(stream, groups, finish=FinishReason.LENGTH):
    """Push the groups, the finish with the last; return every piece handed out."""
    return [
        stream.push(group, finish if index == len(groups) - 1 else None)
        for index, group in enumerate(groups)
    ]


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 40), max_size=8))
def test_any_bytes_in_any_grouping_equal_one_whole_decode(values, cuts):
    ids = [BYTE_LEVEL.encode_byte(value) for value in values]
    pieces = run(text_stream(), grouped(ids, cuts))
    assert "".join(pieces) == bytes(values).decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character(text):
    ids = [BYTE_LEVEL.encode_byte(value) for value in text.encode()]
    for piece in run(text_stream(), [[token] for token in ids] or [[]]):
        assert "\ufffd" not in piece or "\ufffd" in text


def test_emoji_leaves_only_when_its_last_byte_is_there():
    ids = [BYTE_LEVEL.encode_byte(value) for value in "a🙂b".encode()]
    stream = text_stream()
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "🙂", "b"]


def test_incomplete_character_at_the_end_becomes_one_replacement():
    ids = [BYTE_LEVEL.encode_byte(value) for value in "é".encode()[:1]]
    assert "".join(run(text_stream(), [ids])) == "\ufffd"


def test_special_tokens_are_skipped_or_shown():
    ids = [BYTE_LEVEL.encode_byte(ord("x")), BYTE_LEVEL.special_id]
    assert "".join(run(text_stream(), [ids])) == "x"
    assert "".join(run(text_stream(skip_special_tokens=False), [ids])) == "x<|end|>"


def test_unknown_ids_add_nothing():
    assert "".join(run(text_stream(), [[BYTE_LEVEL.encode_byte(65), 10_000_000]])) == "A"


def test_byte_fallback_and_word_boundary_of_sentencepiece():
    ids = SENTENCEPIECE.ids("▁Hi", "▁you", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "▁Hi")
    stream = text_stream(SENTENCEPIECE)
    assert [stream.push([token]) for token in ids] == [" Hi", " you", "", "", "€", "", "\ufffd Hi"]


def test_window_decoder_joins_word_pieces():
    tokenizer = word_piece()
    ids = tokenizer.ids("play", "##ing", "games", "##!")
    stream = text_stream(tokenizer, prompt=tokenizer.ids("games"))
    assert "".join(run(stream, [[token] for token in ids])) == " playing games!"


# ---- stop strings ---------------------------------------------------------------------------


def byte_ids(text):
    return [BYTE_LEVEL.encode_byte(value) for value in text.encode()]


def reference(text, stops, *, include):
    """Character by character: the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[:end] if include else text[: min(starts)], end
    return text, None


@given(
    st.text(alphabet="ab\n€", max_size=24),
    st.lists(st.text(alphabet="ab\n€", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 60), max_size=12),
    st.booleans(),
)
def test_stop_strings_equal_the_reference_in_every_grouping(text, stops, cuts, include):
    want, end = reference(text, stops, include=include)
    stream = text_stream(stops=stops, include_stop=include)
    pieces = run(stream, grouped(byte_ids(text), cuts))
    assert "".join(pieces) == want
    assert stream.finish is (FinishReason.LENGTH if end is None else FinishReason.STOP)
    counted = text if end is None else text[:end]
    assert stream.num_tokens == len(counted.encode())


@given(st.text(alphabet="ab", max_size=24), st.integers(0, 24), st.booleans())
def test_min_tokens_ignores_stops_completed_too_early(text, min_tokens, include):
    stream = text_stream(stops=["ab", "ba"], min_tokens=min_tokens, include_stop=include)
    pieces = run(stream, [[token] for token in byte_ids(text)] or [[]])
    ends = [
        end
        for end in range(2, len(text) + 1)
        if end > min_tokens and text[end - 2] != text[end - 1]
    ]
    want = text if not ends else text[: ends[0] if include else ends[0] - 2]
    assert "".join(pieces) == want


def test_failed_partial_match_is_released_at_once():
    stream = text_stream(stops=["\n\nQ"])
    assert [stream.push([token]) for token in byte_ids("a\n\nX")] == ["a", "", "", "\n\nX"]


def test_stop_equal_to_the_first_token_gives_empty_text_and_one_token():
    stream = text_stream(stops=["a"])
    assert stream.push(byte_ids("abc")) == ""
    assert (stream.num_tokens, stream.finish) == (1, FinishReason.STOP)
    assert stream.push(byte_ids("more")) == ""
    assert stream.num_tokens == 1


def test_held_text_is_released_at_the_end():
    stream = text_stream(stops=["abc"])
    assert run(stream, [byte_ids("xa"), byte_ids("b")]) == ["x", "ab"]


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xy")])
def test_stop_token_is_counted_and_shown_only_on_request(include, text):
    stream = text_stream(include_stop=include)
    assert stream.push(byte_ids("xy"), FinishReason.STOP) == text
    assert stream.num_tokens == 2
