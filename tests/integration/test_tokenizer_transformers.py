"""Ids, prompts and decoded text equal those of transformers for the packaged model."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from cluster.config import read_environment
from cluster.model.resolve import resolve_model
from cluster.tokenizer import LONG_TEXT_CHARS, Tokenizer
from router.http.textstream import detokenizer
from tests.support.exactness import SMOLLM2

TEXTS = [
    "",
    "Hello",
    " leading",
    "a  b\n\n\tc",
    "naïve 🙂 日本語",
    "<|im_start|>user\nhi<|im_end|>",
]
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "Hi 🙂"), ("assistant", "Hello."), ("user", "<b>&amp;</b>")],
]


@pytest.fixture(scope="module")
def reference_and_folder():
    """The converted SmolLM2 folder, and its tokenizer as transformers reads it."""
    folder = resolve_model(SMOLLM2, None, read_environment().cache_dir).path
    return AutoTokenizer.from_pretrained(str(folder)), folder


def test_completion_prompts_equal_transformers(reference_and_folder):
    reference, folder = reference_and_folder
    tokenizer = Tokenizer.load(folder)
    for text in [*TEXTS, "word " * LONG_TEXT_CHARS]:
        assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"]


@pytest.mark.parametrize("chat", CHATS)
def test_chat_prompts_equal_transformers(reference_and_folder, chat):
    reference, folder = reference_and_folder
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": role, "content": content} for role, content in chat]
    text = tokenizer.render_chat(messages)
    assert text == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


def test_streamed_text_equals_the_tokenizers_own_decode(reference_and_folder):
    _, folder = reference_and_folder
    tokenizer = Tokenizer.load(folder)
    for skip in (True, False):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            stream = detokenizer(tokenizer, (), skip_special_tokens=skip)
            streamed = "".join(map(stream.feed, ids)) + stream.flush()
            assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


def test_every_piece_of_the_vocabulary_equals_its_decode(reference_and_folder):
    _, folder = reference_and_folder
    tokenizer = Tokenizer.load(folder)
    pieces = tokenizer.pieces(skip_special_tokens=True)
    assert pieces is not None
    for token_id in range(tokenizer.vocab_size):
        whole = tokenizer.decode([token_id], skip_special_tokens=True)
        assert pieces.raw(token_id).decode("utf-8", "replace") == whole
