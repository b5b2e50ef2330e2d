"""From the config to the plain values a worker is built from.

The one place where both kinds of workers take their settings out of a `Config`, so that inner code
never sees one. Importing it loads neither torch nor transformers: the engine loader it returns does
that when it is called, in the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.model.identity import ModelFolder, model_facts
from cluster.model.timed import TimedCosts
from cluster.types import ModelFacts, Role, WorkerId
from cluster.wire.session import SessionOptions
from cluster.worker import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config import Config
    from cluster.model.runner import LoadedEngine

CONTROL_HOST = "127.0.0.1"


def session_options(config: Config, secret: bytes) -> SessionOptions:
    """What every session of a process shares."""
    return SessionOptions(
        secret=secret,
        heartbeat_s=config.link.heartbeat_s,
        dead_after_s=config.link.dead_after_s,
    )


def served_facts(config: Config, folder: ModelFolder) -> ModelFacts:
    """The served model as router and workers must agree on it.

    Raises:
        ModelError: the folder lacks what serving needs.
    """
    return model_facts(
        folder,
        served_name=config.served_name,
        dtype=config.model.dtype,
        max_len=config.model.max_len,
        block_size=config.block_size,
    )


def worker_settings(
    config: Config, folder: ModelFolder, *, worker: WorkerId, role: Role, secret: bytes
) -> WorkerSettings:
    """Everything a worker needs besides its engine.

    Raises:
        ModelError: the folder lacks what serving needs.
    """
    pool = config.pools.prefill if role is Role.PREFILL else config.pools.decode
    return WorkerSettings(
        worker=worker,
        role=role,
        facts=served_facts(config, folder),
        kv_blocks=pool.kv_blocks,
        chunk_tokens=pool.chunk_tokens,
        max_running=pool.max_running,
        batch_max_wait_s=config.max_wait_s,
        prefix_cache=config.prefix_cache,
        frame_bytes=config.link.frame_bytes,
        checksum=config.link.checksum,
        host=CONTROL_HOST,
        session=session_options(config, secret),
    )


def engine_loader(config: Config, folder: ModelFolder, role: Role) -> Callable[[], LoadedEngine]:
    """A function that loads the engine of a worker; to be called in its engine thread."""
    pool = config.pools.prefill if role is Role.PREFILL else config.pools.decode
    num_threads = config.prefill_threads if role is Role.PREFILL else config.decode_threads
    timed = config.timed
    costs = TimedCosts(
        prefill_a_s=timed.prefill_a_s,
        prefill_b_s_per_token=timed.prefill_b_s_per_token,
        prefill_c_s_per_token2=timed.prefill_c_s_per_token2,
        decode_a_s=timed.decode_a_s,
        decode_b_s_per_seq=timed.decode_b_s_per_seq,
        decode_c_s_per_ctx_token=timed.decode_c_s_per_ctx_token,
        seed=timed.seed,
    )

    def load() -> LoadedEngine:
        from cluster.model.runner import load_engine

        return load_engine(
            folder,
            engine=config.engine,
            dtype=config.model.dtype,
            max_len=config.model.max_len,
            block_size=config.block_size,
            kv_blocks=pool.kv_blocks,
            num_threads=num_threads,
            served_name=config.served_name,
            timed=costs,
        )

    return load
