"""The prefill engine's core: scheduler and runner joined into turns of the engine thread.

It promises that a block named by a step is not freed while the step runs, because commands take
effect only between steps, and that a job to be handed off gets a reference of its own on its
blocks before anyone can release them: the receiver of `Started` owns that reference, and hears of
no other jobs. It knows nothing of sessions, links or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.loop import Turn
from cluster.model.core import LoadingCore
from prefill.scheduler import PrefillScheduler, Progress, PromptDone, Started

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.kv.allocator import BlockLedger
    from cluster.model.runner import LoadedEngine
    from cluster.types import AttemptKey, GenerationJob


@dataclass(frozen=True, slots=True)
class AddJob:
    """Queue a prompt; with `hand_off` its blocks are kept for a transfer."""

    job: GenerationJob
    hand_off: bool


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Drop a prompt wherever it is; unknown keys are ignored."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Nudge:
    """Blocks were freed outside the engine: look again whether something can start."""


PrefillCommand = AddJob | CancelJob | Nudge
PrefillEvent = Started | Progress | PromptDone


class PrefillCore(LoadingCore):
    """EngineCore of a prefill worker; lives in the engine thread."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        ledger: BlockLedger,
        load: Callable[[], LoadedEngine],
    ) -> None:
        """`load` is called in the engine thread, where all torch work belongs."""
        super().__init__(load)
        self._scheduler = scheduler
        self._ledger = ledger
        self._hand_off: set[AttemptKey] = set()

    def handle(self, command: PrefillCommand) -> None:
        """Apply a command between two steps."""
        match command:
            case AddJob(job, hand_off):
                if hand_off:
                    self._hand_off.add(job.key)
                self._scheduler.add(job, monotonic_s())
            case CancelJob(key):
                self._hand_off.discard(key)
                self._scheduler.cancel(key)
            case Nudge():
                pass

    def step(self, now_s: float) -> Turn[PrefillEvent]:
        """Schedule and run one step, if there is one to run."""
        plan = self._scheduler.schedule(now_s)
        kept = [started for started in plan.started if started.key in self._hand_off]
        for started in kept:
            self._ledger.share(started.block_ids)
        events: list[PrefillEvent] = list(kept)
        if plan.batch is None:
            return Turn(events, plan.wake_at_s)
        result = self.loaded.runner.run(plan.batch)
        done_s = monotonic_s()
        outputs = self._scheduler.complete(plan.batch, result, done_s)
        finished = [event for event in outputs if isinstance(event, PromptDone)]
        self._hand_off.difference_update(event.key for event in finished)
        self.meter.record(
            num_tokens=plan.batch.num_tokens,
            prefill_tokens=plan.batch.num_tokens,
            generated_tokens=len(finished),
            duration_s=result.duration_s,
        )
        events.extend(outputs)
        return Turn(events, None if self._scheduler.is_idle else done_s)
