"""Checks before anything is started: is the port free, does the model fit into memory.

Each failure is one sentence that names the key to change. Estimates err on the low side: they
refuse only what cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from cluster.errors import DiptychError
from cluster.model.identity import estimate_block_bytes, read_json, resolve_dtype
from router.http.listener import bind

if TYPE_CHECKING:
    from cluster.config import Config
    from cluster.model.identity import ModelFolder

PROCESS_BYTES = 250 << 20  # interpreter and libraries of one worker
BASE_BYTES = 700 << 20  # Ray and one ingress
GIB = 1 << 30


def claim_port(config: Config) -> Config:
    """Check that the port is free; a port of 0 is replaced by a free one.

    Raises:
        ConfigError: the port is taken or the address is not ours.
    """
    taken = bind(config.http.host, config.http.port)
    port = int(taken.getsockname()[1])
    taken.close()
    return config.model_copy(update={"http": config.http.model_copy(update={"port": port})})


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What the cluster will at least use, bytes."""

    weights: int
    kv_blocks: int
    processes: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.kv_blocks + self.processes


def memory_need(config: Config, folder: ModelFolder) -> MemoryNeed:
    """Estimate from the config and the model's files."""
    facts = read_json(folder.path / "config.json")
    block_bytes = estimate_block_bytes(
        facts, resolve_dtype(facts, config.model.dtype), config.block_size
    )
    weights = sum(file.stat().st_size for file in folder.path.glob("*.safetensors"))
    blocks = (
        config.prefill_replicas * config.pools.prefill.kv_blocks
        + config.decode_replicas * config.pools.decode.kv_blocks
    )
    return MemoryNeed(
        weights=weights * config.num_workers if config.engine == "torch" else 0,
        kv_blocks=blocks * block_bytes,
        processes=BASE_BYTES + PROCESS_BYTES * config.num_workers,
    )


def check_memory(config: Config, folder: ModelFolder) -> None:
    """Refuse a cluster that cannot fit.

    Raises:
        DiptychError: with what is needed, what is there and which key to lower.
    """
    need = memory_need(config, folder)
    available = psutil.virtual_memory().available
    if need.total > available:
        key = "pools.decode.kv_blocks" if need.kv_blocks > need.weights else "model.id"
        raise DiptychError(
            f"{key}: the cluster needs at least {need.total / GIB:.1f} GiB "
            f"(KV blocks {need.kv_blocks / GIB:.1f}, weights {need.weights / GIB:.1f}, "
            f"processes {need.processes / GIB:.1f}) but {available / GIB:.1f} GiB is available; "
            "lower pools.*.kv_blocks or choose a smaller model"
        )
