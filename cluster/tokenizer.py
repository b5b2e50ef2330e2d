"""Text to token ids and back, without torch or transformers.

Owns reading a model folder's `tokenizer.json`, `tokenizer_config.json` and chat template. Promises
the ids that `transformers` would produce for the same folder: special tokens are added to a plain
prompt and never after a template, which writes its own. `Pieces` gives the bytes each token
contributes to a text, from which a stream is decoded exactly and cheaply. Safe to call from any
thread; encoding long text releases the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from cluster.chat_template import ChatTemplate
from cluster.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

LONG_TEXT_CHARS = 16_384  # about 4k tokens: encode longer text off the event loop


class Pieces:
    """The bytes every token adds to a text; built lazily, one entry per token seen.

    Exists for decoders that work token by token (byte-level BPE, and SentencePiece-like ones with
    byte fallback). A continuation is decoded, so a decoder's stripping of the very first space of
    a text does not apply. Skipped tokens contribute nothing.
    """

    def __init__(
        self, raw: tokenizers.Tokenizer, decoder: _ByteDecoder, skip: frozenset[int]
    ) -> None:
        """Serve tokens of `raw`; those in `skip` are treated as empty."""
        self._raw = raw
        self._decoder = decoder
        self._skip = skip
        self.texts: dict[int, str | None] = {}  # complete UTF-8 by itself, else None
        self._bytes: dict[int, bytes] = {}

    def text(self, token_id: int) -> str | None:
        """The token's text if its bytes are valid UTF-8 by themselves, else None."""
        try:
            return self.texts[token_id]
        except KeyError:
            return self._learn(token_id)

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; empty for skipped and unknown ids."""
        if token_id not in self._bytes:
            self._learn(token_id)
        return self._bytes[token_id]

    def _learn(self, token_id: int) -> str | None:
        token = None if token_id in self._skip else self._raw.id_to_token(token_id)
        piece = b"" if token is None else self._decoder.piece(token)
        self._bytes[token_id] = piece
        try:
            text: str | None = piece.decode()
        except UnicodeDecodeError:
            text = None
        self.texts[token_id] = text
        return text


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(
        self, raw: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None
    ) -> None:
        """Wrap a loaded tokenizer; use `load` to read one from a folder."""
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        special = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
        }
        self.special_tokens = {name: text for name, text in special.items() if text is not None}
        self._template = None if template is None else ChatTemplate(template, self.special_tokens)
        self._special_ids = frozenset(
            token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special
        )
        decoder = _byte_decoder(raw)
        self._pieces: dict[bool, Pieces] | None = None  # by skip_special_tokens
        if decoder is not None:
            self._pieces = {
                True: Pieces(raw, decoder, self._special_ids),
                False: Pieces(raw, decoder, frozenset()),
            }

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer files of a model folder. Raises ModelError naming a bad file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; only fast tokenizers can be served")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ModelError(f"{path} cannot be read: {error}") from error
        config = _read_object(folder / "tokenizer_config.json")
        return cls(raw, config, _template_source(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer itself knows, added tokens included."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. A long one is encoded with the GIL released."""
        if len(text) <= LONG_TEXT_CHARS:
            return self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence, as the tokenizer itself decodes it."""
        return self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, *, skip_special_tokens: bool) -> Pieces | None:
        """Per-token bytes, or None when this tokenizer's decoder needs more than one token."""
        return None if self._pieces is None else self._pieces[skip_special_tokens]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Apply the chat template, ending with the header of the assistant's turn.

        Raises:
            UnsupportedError: the model has no chat template.
            RequestError: the template refuses these messages.
        """
        if self._template is None:
            raise UnsupportedError("this model has no chat template", param="messages")
        return self._template.render(messages)


class _ByteDecoder:
    """How a token's name in the vocabulary becomes bytes."""

    def __init__(
        self, *, byte_level: bool, replace: tuple[tuple[str, str], ...], fallback: bool
    ) -> None:
        self._table = _byte_level_table() if byte_level else None
        self._replace = replace
        self._fallback = fallback

    def piece(self, token: str) -> bytes:
        if self._table is not None:
            try:
                return bytes([self._table[char] for char in token])
            except KeyError:  # an added token written as plain text
                return token.encode()
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


def _byte_decoder(raw: tokenizers.Tokenizer) -> _ByteDecoder | None:
    """Recognise a decoder that maps tokens to bytes one by one; None if it is another kind."""
    spec = msgspec.json.decode(raw.to_str())["decoder"]
    steps = [] if spec is None else spec.get("decoders", [spec])
    if not steps:
        return None
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteDecoder(byte_level=True, replace=(), fallback=False)
    replace: list[tuple[str, str]] = []
    fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replace.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replace.append((old, " "))
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
                pass  # joining is what bytes do; a start is stripped only at a text's beginning
            case _:
                return None
    return _ByteDecoder(byte_level=False, replace=tuple(replace), fallback=fallback)


def _byte_level_table() -> dict[str, int]:
    """The printable alphabet of byte-level BPE (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _token_text(value: object) -> str | None:
    """A special token in tokenizer_config.json is a string or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text: `chat_template.jinja` first, then the config's string or named list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None
