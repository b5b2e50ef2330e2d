"""What the engine refuses to load, and what a loaded engine tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.model.identity import ModelFolder
from cluster.model.runner import LoadedEngine, load_engine
from cluster.model.step import SampleSpec, StepBatch, StepSlice
from cluster.model.timed import TimedCosts
from cluster.types import AttemptKey, BlockId, RequestId, SamplingParams
from tests.support.tiny_models import EOS_ID, MAX_LEN, VOCAB_SIZE, build_tiny

COSTS = TimedCosts(0, 0, 0, 0, 0, 0)


def load(path: Path, *, engine: str = "torch", dtype: str = "auto") -> LoadedEngine:
    return load_engine(
        ModelFolder(path=path, revision="test", content_hash="0" * 64),
        engine=engine,
        dtype=dtype,
        max_len=None,
        block_size=16,
        kv_blocks=8,
        num_threads=1,
        served_name="tiny",
        timed=COSTS if engine == "timed" else None,
    )


def save_random(config, path: Path) -> Path:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


def test_facts_and_phases(tiny: Path) -> None:
    engine = load(tiny)
    assert engine.facts.vocab_size == VOCAB_SIZE
    assert engine.facts.max_len == MAX_LEN
    assert engine.facts.eos_token_ids == (EOS_ID,)
    assert engine.layout.dtype == "float32"
    assert {"import_torch", "load", "pool", "warmup"} <= set(engine.phases_s)
    assert all(seconds >= 0 for seconds in engine.phases_s.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_element_types_load_and_answer(tiny: Path, dtype: str) -> None:
    engine = load(tiny, dtype=dtype)
    assert engine.layout.dtype == dtype
    assert engine.facts.fingerprint != load(tiny).facts.fingerprint
    piece = StepSlice(
        key=AttemptKey(RequestId("r"), 1),
        token_ids=(1, 2, 3),
        start=0,
        block_ids=(BlockId(3),),
        sample=SampleSpec(SamplingParams(max_tokens=1), 0, 0),
    )
    [token] = engine.runner.run(StepBatch((piece,))).token_ids
    assert token is not None
    assert 0 <= token < VOCAB_SIZE


def test_the_timed_engine_has_the_real_layout_without_loading_weights(tiny: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from cluster.model.identity import ModelFolder;"
        "from cluster.model.runner import load_engine;"
        "from cluster.model.timed import TimedCosts;"
        f"e = load_engine(ModelFolder(Path({str(tiny)!r}), 'r', '0'*64), engine='timed',"
        "dtype='auto', max_len=None, block_size=16, kv_blocks=8, num_threads=1,"
        "served_name='t', timed=TimedCosts(0, 0, 0, 0, 0, 0));"
        "assert 'transformers' not in sys.modules; print(e.layout.block_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(done.stdout) == load(tiny).layout.block_bytes


def test_models_whose_attention_ignores_us_are_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig, FalconConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for config in (FalconConfig(**sizes), BloomConfig(**{**sizes, "n_head": 4, "n_layer": 2})):
        path = save_random(config, tmp_path / config.model_type)
        with pytest.raises(ModelError, match="cannot be served"):
            load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 16}, "attention_chunk_size"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "no_such_family"}, "cannot be loaded"),
        ({"num_hidden_layers": 4}, "lacks 9 weights"),
        ({"vocab_size": 300}, "cannot be loaded|wrong shape"),
    ],
)
def test_unfit_configs_are_refused_in_one_sentence(
    tiny: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message


def test_torn_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)
