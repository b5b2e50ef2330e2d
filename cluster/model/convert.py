"""Converts a packaged GGUF model into a plain Hugging Face folder; run as a child process.

`python -m cluster.model.convert GGUF_FILE OUT_DIR` writes bf16 safetensors, the tokenizer and the
chat template. It is a process of its own because it needs torch and transformers, several hundred
megabytes and half a minute, none of which the caller wants to keep. Each stage is announced on
stdout as `FRACTION TEXT`; an exception ends the process with its traceback on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path


def _report(fraction: float, text: str) -> None:
    sys.stdout.write(f"{fraction:.2f} {text}\n")
    sys.stdout.flush()


def convert_gguf(gguf: Path, out_dir: Path) -> None:
    """Write the model in `gguf` to `out_dir` as unpacked bf16 safetensors with its tokenizer."""
    _report(0.05, "starting the converter")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import GgufConfig

    logging.disable_progress_bar()
    _report(0.15, "reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True
    )
    tokenizer.save_pretrained(str(out_dir))
    _report(0.45, "unpacking the weights")
    # Without `dequantize` the weights stay packed: slow on a CPU, and impossible to save.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        local_files_only=True,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    _report(0.95, "writing the converted model")
    model.save_pretrained(str(out_dir))
    _report(1.0, "converted")


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
