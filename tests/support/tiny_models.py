"""Tiny random models that the whole stack can serve, and the oracle for their greedy output.

`build_tiny` writes a folder with fp32 weights, a byte-level tokenizer and a chat template;
`oracle_generate` runs unmodified `transformers` on it with eager attention. Weights are wide
enough that greedy output varies, so a wrong token cannot hide in a constant stream.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_LEN = 1024
EOS_ID = 258
FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt2")
ODD_FAMILIES = ("gemma2", "gpt_oss", "deepseek_v3")  # soft caps, sinks, unequal K and V
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SEEDS = {"gpt_oss": 7}
_WINDOW = 24  # shorter than most test prompts, and no multiple of the block size


def _config(family: str) -> Any:
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": EOS_ID,
        "pad_token_id": 259,
    }
    if family == "llama":
        return transformers.LlamaConfig(**common)
    if family == "qwen3":
        return transformers.Qwen3Config(**common)
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=_WINDOW)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **common,
            sliding_window=_WINDOW,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    if family == "gemma2":  # soft-capped scores
        return transformers.Gemma2Config(
            **common, sliding_window=_WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=5.0
        )
    if family == "gpt_oss":  # attention sinks, experts
        return transformers.GptOssConfig(
            **common,
            sliding_window=_WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    if family == "deepseek_v3":  # K and V of different sizes
        return transformers.DeepseekV3Config(**_latent(common))
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=MAX_LEN,
            n_embd=48,
            n_layer=3,
            n_head=4,
            initializer_range=0.25,
            tie_word_embeddings=False,
            bos_token_id=257,
            eos_token_id=EOS_ID,
            pad_token_id=259,
        )
    msg = f"unknown family {family!r}"
    raise ValueError(msg)


def _latent(common: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: value for name, value in common.items() if name != "head_dim"}
    return sizes | {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }


def _save_tokenizer(out_dir: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(out_dir))


def build_tiny(family: str, out_dir: Path, seed: int | None = None) -> Path:
    """Write a tiny random fp32 model of `family` with tokenizer and template; returns `out_dir`.

    Without a seed the weights are ones known to give varied greedy output, free of near ties.
    """
    import torch
    from transformers import AutoModelForCausalLM

    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(_SEEDS.get(family, 3) if seed is None else seed)
        model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    model.save_pretrained(str(out_dir))
    _save_tokenizer(out_dir)
    return out_dir


def random_prompt(length: int, seed: int) -> list[int]:
    """Return `length` ordinary token ids."""
    draw = random.Random(seed * 1000 + length)
    return [draw.randrange(256) for _ in range(length)]


@functools.cache
def _oracle(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def oracle_generate(
    path: Path, prompt_ids: list[int], max_new_tokens: int
) -> tuple[list[int], float]:
    """Greedy-decode with unmodified `transformers`, EOS being a token like any other.

    Returns:
        The tokens, and the smallest gap between the best and second-best logit of any step: two
        correct engines may differ where it is of the size of rounding.
    """
    import torch

    model = _oracle(path)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([step[0] for step in out.logits]).topk(2, dim=-1).values  # [steps, 2]
    margin = float((top[:, 0] - top[:, 1]).min())
    return out.sequences[0, len(prompt_ids) :].tolist(), margin
