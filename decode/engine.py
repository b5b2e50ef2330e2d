"""The decode engine's core: scheduler and runner joined into turns of the engine thread.

Sequences enter in two ways: attached, with the KV of their prompt already in the pool, or local,
to be prefilled here in chunks beside the decode rows. Commands take effect only between steps, so
a block named by a step is never freed while the step runs. It knows nothing of sessions or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.loop import Turn
from cluster.model.core import LoadingCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.model.runner import LoadedEngine
    from cluster.model.step import StepSlice
    from cluster.types import AttemptKey, BlockId, GenerationJob
    from decode.scheduler import DecodeScheduler, TokenOut


@dataclass(frozen=True, slots=True)
class Attach:
    """A verified transfer: take over the references on `block_ids` and go on from token 1."""

    job: GenerationJob
    block_ids: tuple[BlockId, ...]
    first_token: int


@dataclass(frozen=True, slots=True)
class AddLocal:
    """Prefill and decode here; the ticket is already promised under the job's key."""

    job: GenerationJob


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Drop a sequence wherever it is; unknown keys are ignored."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Nudge:
    """Room appeared outside the engine: look again whether something can go on."""


DecodeCommand = Attach | AddLocal | CancelJob | Nudge


class DecodeCore(LoadingCore):
    """EngineCore of a decode worker; lives in the engine thread."""

    def __init__(self, scheduler: DecodeScheduler, load: Callable[[], LoadedEngine]) -> None:
        """`load` is called in the engine thread, where all torch work belongs."""
        super().__init__(load)
        self._scheduler = scheduler

    def handle(self, command: DecodeCommand) -> None:
        """Apply a command between two steps."""
        match command:
            case Attach(job, block_ids, first_token):
                self._scheduler.attach(job, block_ids, first_token, monotonic_s())
            case AddLocal(job):
                self._scheduler.add_local(job, monotonic_s())
            case CancelJob(key):
                self._scheduler.cancel(key)
            case Nudge():
                pass

    def step(self, now_s: float) -> Turn[TokenOut]:
        """Schedule and run one step, if there is one to run."""
        batch = self._scheduler.schedule(now_s)
        if batch is None:
            return Turn((), None)
        result = self.loaded.runner.run(batch)
        done_s = monotonic_s()
        outputs = self._scheduler.complete(batch, result, done_s)
        self.meter.record(
            num_tokens=batch.num_tokens,
            prefill_tokens=sum(len(s.token_ids) for s in batch.slices if not _is_decode_row(s)),
            generated_tokens=len(outputs),
            duration_s=result.duration_s,
        )
        return Turn(outputs, None if self._scheduler.is_idle else done_s)


def _is_decode_row(piece: StepSlice) -> bool:
    """A one-token chunk that yields output 0 still computes prompt, so it counts as prefill."""
    return piece.sample is not None and len(piece.token_ids) == 1 and piece.sample.position > 0
