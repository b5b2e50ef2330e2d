"""Loads an unmodified `transformers` model with our attention and measures its KV layout.

Everything that would make a model silently wrong is refused here, as one `ModelError`: an attention
path that ignores us, layers that keep state outside attention, weights missing from the files. The
measured layout, not the config, sizes the pool. Must run in the engine thread.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cluster.errors import ModelError
from cluster.kv.layout import KvLayout
from cluster.kv.pool import torch_dtype
from cluster.model.attention import IMPLEMENTATION, KvProbe, paged_attention
from cluster.model.identity import Json, read_json, resolve_dtype, text_config

if TYPE_CHECKING:
    from pathlib import Path

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Attention that only a mask would describe: nothing of it reaches an attention function.
_MASKED_ATTENTION = ("attention_chunk_size",)
_PROBE_TOKENS = 5

logger = logging.getLogger(__name__)

transformers_logging.disable_progress_bar()  # a worker's output is a log, not a terminal
AttentionInterface.register(IMPLEMENTATION, paged_attention)


def load_model(path: Path, *, dtype: str) -> PreTrainedModel:
    """Load the weights in `path` and switch attention to the paged implementation.

    Args:
        path: folder of safetensors and JSON.
        dtype: "auto" or an element type.

    Raises:
        ModelError: the model is broken or not supported.
    """
    config = read_json(path / "config.json")
    check_config(path, config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch_dtype(resolve_dtype(config, dtype)),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        msg = f"model {path} cannot be loaded: {reason}"
        raise ModelError(msg) from error
    absent = sorted([*info["missing_keys"], *(str(item) for item in info["mismatched_keys"])])
    if absent:
        msg = (
            f"model {path} lacks {len(absent)} weights (or has them in a wrong shape): {absent[0]}"
        )
        raise ModelError(msg)
    model.eval()
    _use_paged_attention(path, model)
    return model


def check_config(path: Path, config: Json) -> None:
    """Refuse by `config.json` what would load and then answer wrongly.

    Raises:
        ModelError: names the reason.
    """
    inner = text_config(config)
    odd = sorted(set(inner.get("layer_types") or ()) - LAYER_TYPES)
    if odd:
        msg = f"model {path} has layers of type {odd[0]!r}; only attention layers are supported"
        raise ModelError(msg)
    if config.get("quantization_config"):
        msg = f"model {path} is quantised; only plain safetensors weights are supported"
        raise ModelError(msg)
    for name in _MASKED_ATTENTION:
        if inner.get(name):
            msg = f"model {path} uses {name}, which the paged attention does not support"
            raise ModelError(msg)


def _use_paged_attention(path: Path, model: PreTrainedModel) -> None:
    """Switch the implementation and check that the model really took it."""
    kind = type(model).__name__
    if not model.is_backend_compatible():
        msg = f"model {path}: {kind} has no pluggable attention, so it cannot be served"
        raise ModelError(msg)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config.get_text_config()._attn_implementation != IMPLEMENTATION:
        msg = f"model {path}: {kind} ignores the attention implementation, so it cannot be served"
        raise ModelError(msg)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        msg = f"model {path}: {kind} cannot limit its logits to chosen tokens"
        raise ModelError(msg)


def measure_layout(path: Path, model: PreTrainedModel, *, dtype: str, block_size: int) -> KvLayout:
    """Run a few tokens through the model and note what KV every layer produces.

    Raises:
        ModelError: a layer produced none, so it keeps its state elsewhere.
    """
    probe = KvProbe()
    ids = torch.arange(_PROBE_TOKENS)[None]  # [1, T]
    with torch.inference_mode():
        model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1, paged=probe)
    expected = model.config.get_text_config().num_hidden_layers
    missing = sorted(set(range(expected)) - set(probe.shapes))
    if missing:
        msg = f"model {path}: layer {missing[0]} has no attention KV; such models cannot be served"
        raise ModelError(msg)
    layers = tuple(probe.shapes[index] for index in sorted(probe.shapes))
    return KvLayout(layers=layers, dtype=dtype, block_size=block_size)
