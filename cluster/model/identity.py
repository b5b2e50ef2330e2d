"""What a model is, read from its files alone: content hash, fingerprint, facts, KV shapes.

Everything here works on JSON and bytes, so the router and the preflight checks learn about a model
in milliseconds. The fingerprint is the seed of all block hashes: two workers with equal
fingerprints write interchangeable KV. Never imports torch or transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelError
from cluster.kv.layout import DTYPE_BYTES, KvLayout, LayerShape
from cluster.types import ModelFacts

MAX_LEN_CAP_TOKENS = 131_072  # default of model.max_len for models that allow more
FALLBACK_MAX_LEN_TOKENS = 8_192  # for configs that name no maximum
_HASHED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template*")
_CHUNK_BYTES = 1 << 22

Json = Mapping[str, Any]  # Any: parsed JSON of other people's files


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A local folder of safetensors and JSON that passed the checks of `resolve.py`."""

    path: Path
    revision: str  # commit of a repository, version of a package, "local" for a folder
    content_hash: str  # hex SHA-256 over weights, tokenizer, chat template and config


# ---- files -------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; an absent file is an empty one.

    Raises:
        ModelError: the file is not a JSON object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        msg = f"model file {path} cannot be read: {error}"
        raise ModelError(msg) from error
    if not isinstance(parsed, dict):
        msg = f"model file {path} is not a JSON object"
        raise ModelError(msg)
    return parsed


def _identity_files(path: Path) -> list[Path]:
    found = {file for pattern in ("*.safetensors", *_HASHED) for file in path.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def content_hash(path: Path, cache_dir: Path | None = None) -> str:
    """Hash weights, tokenizer, chat template and config of a model folder (hex SHA-256).

    The result is kept in `cache_dir`, valid as long as path, sizes and modification times of all
    those files stay the same, so only the first start reads the weights twice.
    """
    files = _identity_files(path)
    stats = [file.stat() for file in files]
    facts = [
        str(path),
        [(f.name, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)],
    ]
    stamp = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    entry = cache_dir / stamp if cache_dir else None
    if entry is not None:
        with contextlib.suppress(OSError):
            cached = entry.read_text(encoding="ascii").strip()
            if len(cached) == 2 * hashlib.sha256().digest_size:
                return cached
    digest = hashlib.sha256()
    for file, stat in zip(files, stats, strict=True):
        digest.update(f"{len(file.name)}:{file.name}:{stat.st_size}:".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    if entry is not None:
        _write_atomically(entry, digest.hexdigest())
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    """Best effort: a cache that cannot be written only costs time at the next start."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(text)
        Path(name).replace(path)


# ---- numbers from config.json -------------------------------------------------------------------


def text_config(config: Json) -> Json:
    """Return the part of `config.json` that describes the language model."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def resolve_dtype(config: Json, dtype: str) -> str:
    """Return the element type served: `dtype`, or for "auto" the one the weights were saved in."""
    if dtype != "auto":
        return dtype
    saved = text_config(config).get("dtype") or text_config(config).get("torch_dtype")
    name = str(saved or "float32").removeprefix("torch.")
    return name if name in DTYPE_BYTES else "float32"


def _number(config: Json, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _need(config: Json, *names: str) -> int:
    value = _number(config, *names)
    if value is None:
        msg = f"config.json names none of {', '.join(names)}: this model family is not supported"
        raise ModelError(msg)
    return value


def kv_layout(config: Json, dtype: str, block_size: int) -> KvLayout:
    """Derive the KV layout from common field names of `config.json`.

    The torch engine measures its layout on the loaded model; this estimate is exact for the
    families it supports and serves preflight checks and `engine: timed`.

    Raises:
        ModelError: the config lacks the fields.
    """
    config = text_config(config)
    layers = _need(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _need(config, "num_attention_heads", "n_head", "num_heads")
    kv_heads = _number(config, "num_key_value_heads", "num_kv_heads") or heads
    if latent_dim := _number(config, "qk_nope_head_dim"):  # expanded latent attention
        k_dim = latent_dim + (_number(config, "qk_rope_head_dim") or 0)
        v_dim = _need(config, "v_head_dim")
    else:
        k_dim = _number(config, "head_dim") or _need(config, "hidden_size", "n_embd") // heads
        v_dim = k_dim
    shape = LayerShape(k_heads=kv_heads, k_dim=k_dim, v_heads=kv_heads, v_dim=v_dim)
    return KvLayout((shape,) * layers, resolve_dtype(config, dtype), block_size)


def estimate_block_bytes(config: Json, dtype: str, block_size: int) -> int:
    """Bytes of one KV block, for memory checks before anything is loaded."""
    return kv_layout(config, dtype, block_size).block_bytes


# ---- facts and fingerprint ----------------------------------------------------------------------


def fingerprint(content: str, config: Json, *, dtype: str, block_size: int) -> str:
    """Hash everything that decides whether KV of one worker is valid on another (hex SHA-256).

    Args:
        content: content hash of the folder.
        config: its parsed `config.json`.
        dtype: element type served, never "auto".
        block_size: tokens a block.
    """
    inner = text_config(config)
    rope = {name: inner.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta")}
    fields = {
        "content": content,
        "dtype": dtype,
        "rope": json.dumps(rope, sort_keys=True),
        "quantisation": json.dumps(config.get("quantization_config"), sort_keys=True),
        "block_size": str(block_size),
    }
    digest = hashlib.sha256()
    for name, value in fields.items():
        for part in (name, value):
            digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()


def special_tokens(path: Path) -> dict[str, int]:
    """Ids of the tokenizer's special tokens by their text."""
    added = read_json(path / "tokenizer.json").get("added_tokens") or []
    return {item["content"]: item["id"] for item in added if item.get("special")}


def _eos_token_ids(path: Path, config: Json, special: Mapping[str, int]) -> tuple[int, ...]:
    """Collect every id that ends a generation: generation config (or config) and tokenizer."""
    named = read_json(path / "generation_config.json").get("eos_token_id")
    if named is None:
        named = text_config(config).get("eos_token_id")
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    token = read_json(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in special:
        ids.add(special[text])
    return tuple(sorted(int(token_id) for token_id in ids))


def max_len_tokens(config: Json, max_len: int | None) -> int:
    """Return the longest sequence to serve, prompt plus output.

    Raises:
        ModelError: `max_len` exceeds what the model was built for.
    """
    supported = _number(text_config(config), "max_position_embeddings", "n_positions", "n_ctx")
    if max_len is None:
        return min(supported or FALLBACK_MAX_LEN_TOKENS, MAX_LEN_CAP_TOKENS)
    if supported is not None and max_len > supported:
        msg = f"model.max_len {max_len} exceeds the {supported} positions this model supports"
        raise ModelError(msg)
    return max_len


def model_facts(
    folder: ModelFolder, *, served_name: str, dtype: str, max_len: int | None, block_size: int
) -> ModelFacts:
    """Read what the router must know of a model without loading it.

    Args:
        folder: the resolved model.
        served_name: name clients use.
        dtype: "auto" or an element type.
        max_len: longest sequence in tokens; None takes what the model supports.
        block_size: tokens a block.

    Raises:
        ModelError: a file is broken, or `max_len` is more than the model supports.
    """
    config = read_json(folder.path / "config.json")
    return ModelFacts(
        served_name=served_name,
        fingerprint=fingerprint(
            folder.content_hash,
            config,
            dtype=resolve_dtype(config, dtype),
            block_size=block_size,
        ),
        revision=folder.revision,
        max_len=max_len_tokens(config, max_len),
        vocab_size=_need(text_config(config), "vocab_size"),
        block_size=block_size,
        eos_token_ids=_eos_token_ids(folder.path, config, special_tokens(folder.path)),
    )
