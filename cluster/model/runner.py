"""Builds a worker's engine: weights (or a clock), KV pool and facts, with the time each took.

`load_engine` is the one entry for both engines. It must run in the engine thread, which then makes
every later call of the runner too: a second OpenMP master would slow both threads down. torch and
transformers are imported inside, so that importing this module costs nothing and the import is
measured as a phase of the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.clock import monotonic_s
from cluster.errors import ModelError
from cluster.model.identity import ModelFolder, kv_layout, model_facts, read_json, resolve_dtype
from cluster.model.step import Runner, SampleSpec, StepBatch, StepSlice
from cluster.model.timed import TimedCosts, TimedRunner, timed_vocabulary
from cluster.types import AttemptKey, BlockId, ModelFacts, RequestId, SamplingParams

if TYPE_CHECKING:
    from cluster.kv.layout import KvLayout
    from cluster.kv.pool import KvPool

_WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """Everything a worker's core needs of its engine."""

    runner: Runner
    pool: KvPool
    layout: KvLayout
    facts: ModelFacts
    phases_s: dict[str, float]  # import_torch, import_transformers, load, pack, pool, warmup


class _Phases:
    """Times consecutive phases."""

    def __init__(self) -> None:
        self.durations_s: dict[str, float] = {}
        self._last_s = monotonic_s()

    def end(self, name: str) -> None:
        now_s = monotonic_s()
        self.durations_s[name] = now_s - self._last_s
        self._last_s = now_s


def load_engine(  # noqa: PLR0913 - plain values, all by name
    folder: ModelFolder,
    *,
    engine: Literal["torch", "timed"],
    dtype: str,
    max_len: int | None,
    block_size: int,
    kv_blocks: int,
    num_threads: int,
    served_name: str,
    timed: TimedCosts | None = None,
) -> LoadedEngine:
    """Load the model (or the costs that stand for it) and allocate its pool.

    Args:
        folder: the resolved model.
        engine: "torch" computes, "timed" waits.
        dtype: "auto" or an element type, of weights and KV alike.
        max_len: longest sequence in tokens; None takes what the model supports.
        block_size: tokens a block.
        kv_blocks: rows of the pool.
        num_threads: OpenMP threads of the calling thread.
        served_name: name clients use.
        timed: costs, needed by engine "timed" alone.

    Raises:
        ModelError: the model is broken or not supported, or memory does not suffice.
    """
    phases = _Phases()
    import torch

    torch.set_num_threads(num_threads)
    phases.end("import_torch")
    facts = model_facts(
        folder, served_name=served_name, dtype=dtype, max_len=max_len, block_size=block_size
    )
    config = read_json(folder.path / "config.json")
    if engine == "timed":
        if timed is None:
            msg = "engine: timed needs its costs"
            raise ModelError(msg)
        layout = kv_layout(config, dtype, block_size)
        runner: Runner = TimedRunner(timed, timed_vocabulary(folder.path, facts.vocab_size))
        phases.end("load")
        pool = _make_pool(layout, kv_blocks)
        phases.end("pool")
        return LoadedEngine(runner, pool, layout, facts, phases.durations_s)
    return _load_torch(folder, resolve_dtype(config, dtype), facts, kv_blocks, phases)


def _make_pool(layout: KvLayout, kv_blocks: int) -> KvPool:
    from cluster.kv.pool import KvPool

    return KvPool(layout, kv_blocks)


def _load_torch(
    folder: ModelFolder, dtype: str, facts: ModelFacts, kv_blocks: int, phases: _Phases
) -> LoadedEngine:
    from cluster.model.loader import load_model, measure_layout
    from cluster.model.packing import pack_linears
    from cluster.model.torch_runner import TorchRunner

    phases.end("import_transformers")
    model = load_model(folder.path, dtype=dtype)
    layout = measure_layout(folder.path, model, dtype=dtype, block_size=facts.block_size)
    phases.end("load")
    pack_linears(model)
    phases.end("pack")
    pool = _make_pool(layout, kv_blocks)
    phases.end("pool")
    runner = TorchRunner(model, pool)
    _warm_up(runner, kv_blocks, facts)
    phases.end("warmup")
    return LoadedEngine(runner, pool, layout, facts, phases.durations_s)


def _warm_up(runner: Runner, kv_blocks: int, facts: ModelFacts) -> None:
    """Run a prompt and a decode step, so the first request pays for no lazy initialisation.

    The rows it writes are free and unhashed at this time, so nothing can ever read them.
    """
    length = min(_WARMUP_TOKENS, kv_blocks * facts.block_size - 1, facts.max_len - 1)
    table = tuple(BlockId(index) for index in range(-(-(length + 1) // facts.block_size)))
    key = AttemptKey(RequestId("warm-up"), 1)
    spec = SampleSpec(params=SamplingParams(max_tokens=2), position=0, prompt_digest=0)
    for ids, start in ((tuple(range(length)), 0), ((0,), length)):
        tokens = tuple(token % facts.vocab_size for token in ids)
        piece = StepSlice(key=key, token_ids=tokens, start=start, block_ids=table, sample=spec)
        runner.run(StepBatch(slices=(piece,)))
