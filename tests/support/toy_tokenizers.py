"""Tiny tokenizers of the three decoder families, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from cluster.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ToyTokenizer(Tokenizer):
    """A tokenizer with names for its ids."""

    def ids(self, *tokens):
        """Ids of vocabulary entries."""
        return [self._raw.token_to_id(token) for token in tokens]

    def encode_byte(self, value):
        """Id of a single byte in a byte-level vocabulary."""
        return value

    @property
    def special_id(self):
        """Id of <|end|>."""
        return self._raw.token_to_id("<|end|>")


def byte_level():
    """Byte-level BPE without merges: id == byte value, plus <|end|> as 256."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in alphabet]
    chars = {byte: chr(byte) for byte in alphabet}
    chars |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
    raw = RawTokenizer(models.BPE(vocab={chars[byte]: byte for byte in range(256)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return ToyTokenizer(raw, {"eos_token": "<|end|>"}, CHAT_TEMPLATE)


def sentencepiece_like():
    """BPE with byte fallback and the word-boundary mark, as Llama 2 and Gemma use."""
    names = ["▁Hi", "▁you", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = RawTokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return ToyTokenizer(raw, {}, None)


def word_piece():
    """A decoder that must see neighbours."""
    names = ["[UNK]", "play", "##ing", "games", "##!"]
    vocab = {name: index for index, name in enumerate(names)}
    raw = RawTokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece(cleanup=False)
    return ToyTokenizer(raw, {}, None)
