"""What is read from a model's files: identity, facts, KV shapes, and refusals of bad folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.kv.layout import LayerShape
from cluster.model.identity import (
    ModelFolder,
    content_hash,
    estimate_block_bytes,
    fingerprint,
    kv_layout,
    model_facts,
    resolve_dtype,
)
from cluster.model.resolve import resolve_model

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write(path, "config.json", CONFIG)
    write(path, "tokenizer.json", {"added_tokens": [{"id": 7, "content": "<e>", "special": True}]})
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


def facts_of(path: Path, max_len: int | None = None):
    folder = ModelFolder(path, "local", content_hash(path))
    return model_facts(folder, served_name="m", dtype="auto", max_len=max_len, block_size=16)


# ---- KV shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shape", "layers"),
    [
        (CONFIG, LayerShape(2, 8, 2, 8), 2),
        ({**CONFIG, "head_dim": 64}, LayerShape(2, 64, 2, 64), 2),
        ({"n_layer": 3, "n_head": 4, "n_embd": 48}, LayerShape(4, 12, 4, 12), 3),
        ({"text_config": CONFIG}, LayerShape(2, 8, 2, 8), 2),
        (
            {
                **CONFIG,
                "num_key_value_heads": 4,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
            },
            LayerShape(4, 24, 4, 12),
            2,
        ),
    ],
)
def test_kv_shapes_by_common_field_names(
    config: dict[str, object], shape: LayerShape, layers: int
) -> None:
    layout = kv_layout(config, "float32", 16)
    assert layout.layers == (shape,) * layers
    assert estimate_block_bytes(config, "float32", 16) == layout.block_bytes
    assert estimate_block_bytes(config, "bfloat16", 32) == layout.block_bytes


def test_an_unknown_family_is_refused_by_field_name() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        kv_layout({"layers": 3}, "float32", 16)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "auto", "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "auto", "bfloat16"),
        ({}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_dtype(config: dict[str, object], dtype: str, expected: str) -> None:
    assert resolve_dtype(config, dtype) == expected


# ---- facts --------------------------------------------------------------------------------------


def test_facts(model_dir: Path) -> None:
    facts = facts_of(model_dir)
    assert (facts.max_len, facts.vocab_size, facts.block_size) == (512, 100, 16)
    assert facts.eos_token_ids == (1,)
    assert facts.revision == "local"


def test_every_source_of_eos_counts(model_dir: Path) -> None:
    write(model_dir, "generation_config.json", {"eos_token_id": [3, 2]})
    assert facts_of(model_dir).eos_token_ids == (2, 3)  # instead of the config's
    write(model_dir, "tokenizer_config.json", {"eos_token": {"content": "<e>"}})
    assert facts_of(model_dir).eos_token_ids == (2, 3, 7)
    write(model_dir, "tokenizer_config.json", {"eos_token": "<e>"})
    assert facts_of(model_dir).eos_token_ids == (2, 3, 7)


def test_max_len_may_be_lowered_but_not_raised(model_dir: Path) -> None:
    assert facts_of(model_dir, 100).max_len == 100
    with pytest.raises(ModelError, match=r"max_len 513 exceeds the 512 positions"):
        facts_of(model_dir, 513)


# ---- identity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_the_content_hash_covers_all_that_makes_the_model(model_dir: Path, name: str) -> None:
    before = content_hash(model_dir)
    (model_dir / "README.md").write_text("no part of it")
    assert content_hash(model_dir) == before
    (model_dir / name).write_text("changed")
    assert content_hash(model_dir) != before


def test_equal_files_elsewhere_hash_alike(model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert content_hash(copy) == content_hash(model_dir)


def test_the_hash_is_kept_until_a_file_changes(model_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hashes"
    first = content_hash(model_dir, cache)
    [entry] = cache.iterdir()
    entry.write_text("f" * 64)
    assert content_hash(model_dir, cache) == "f" * 64  # taken from the cache, not computed
    entry.write_text("torn")
    assert content_hash(model_dir, cache) == first
    (model_dir / "model.safetensors").write_bytes(b"other weights")
    assert content_hash(model_dir, cache) not in (first, "f" * 64)


def test_an_unwritable_cache_only_costs_time(model_dir: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert content_hash(model_dir, blocked / "hashes") == content_hash(model_dir)


def test_the_fingerprint_changes_with_everything_kv_depends_on() -> None:
    prints = {
        fingerprint("a", CONFIG, dtype="bfloat16", block_size=16),
        fingerprint("b", CONFIG, dtype="bfloat16", block_size=16),
        fingerprint("a", CONFIG, dtype="float32", block_size=16),
        fingerprint("a", CONFIG, dtype="bfloat16", block_size=32),
        fingerprint("a", {**CONFIG, "rope_theta": 5.0}, dtype="bfloat16", block_size=16),
        fingerprint("a", {**CONFIG, "quantization_config": {}}, dtype="bfloat16", block_size=16),
    }
    assert len(prints) == 6


# ---- resolving ----------------------------------------------------------------------------------


def test_a_folder_resolves_to_itself(model_dir: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(model_dir), None, tmp_path / "cache")
    assert folder == ModelFolder(model_dir.resolve(), "local", content_hash(model_dir.resolve()))


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "has no weights; safetensors are required"),
        ("model.safetensors", "pytorch_model.bin", "only pickle weights"),
    ],
)
def test_incomplete_folders_are_refused(
    model_dir: Path, tmp_path: Path, remove: str, add: str | None, message: str
) -> None:
    (model_dir / remove).unlink()
    if add:
        (model_dir / add).write_bytes(b"pickle")
    with pytest.raises(ModelError, match=message):
        resolve_model(str(model_dir), None, tmp_path / "cache")


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none/at/all", "a b"])
def test_a_missing_folder_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        resolve_model(name, None, tmp_path)


def test_reading_a_model_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, cluster.model.resolve, cluster.model.runner, cluster.model.timed;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
