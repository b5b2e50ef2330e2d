"""A token layer that follows a script, behind the same protocol as the real one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.types import FinishReason, ModelFacts
from router.generation import ChoiceDelta, ClientRequest, Readiness, Routed

if TYPE_CHECKING:
    from cluster.errors import DiptychError

FACTS = ModelFacts(
    served_name="org/toy",
    fingerprint="f" * 64,
    revision="r1",
    max_len=256,
    vocab_size=300,
    block_size=16,
    eos_token_ids=(256,),
)


@dataclass
class Script:
    """How a generation goes: groups of tokens per choice, gates and a failure."""

    groups: list[tuple[int, ...]] = field(default_factory=list)  # replayed for every choice
    finish: FinishReason = FinishReason.LENGTH
    error: DiptychError | None = None  # after the groups, instead of the finish
    hold: asyncio.Event | None = None  # before token 1
    hold_after: int | None = None  # wait on `resume` before this group
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    prefill: str | None = "prefill-0"
    cached_tokens: int = 2


class ScriptedGeneration:
    """Implements `Generation`; remembers what it was told."""

    def __init__(self, request: ClientRequest, script: Script) -> None:
        self.request = request
        self.script = script
        self.cached_tokens = script.cached_tokens
        self.stopped: dict[int, tuple[FinishReason, int]] = {}
        self.marks: list[str] = []
        self.closed = asyncio.Event()

    async def first(self):
        if self.script.hold is not None:
            await self.script.hold.wait()
        if self.script.error is not None and not self.script.groups:
            raise self.script.error
        return Routed(self.script.prefill, "decode-0", self.script.cached_tokens)

    async def deltas(self):
        last = len(self.script.groups) - 1
        for position, group in enumerate(self.script.groups):
            if position == self.script.hold_after:
                await self.script.resume.wait()
            for index in range(self.request.num_choices):
                if index in self.stopped:
                    continue
                ends = position == last and self.script.error is None
                yield ChoiceDelta(index, group, self.script.finish if ends else None)
        if self.script.error is not None:
            raise self.script.error

    def stop_choice(self, index, reason, num_tokens):
        self.stopped[index] = (reason, num_tokens)

    async def aclose(self):
        self.closed.set()

    def mark(self, name):
        self.marks.append(name)


class ScriptedFlow:
    """Implements `FlowApi`; `generations` are all that were started, oldest first."""

    def __init__(self, script: Script | None = None) -> None:
        self.facts = FACTS
        self.script = script or Script()
        self.generations: list[ScriptedGeneration] = []
        self.started = asyncio.Event()
        self.refusal: DiptychError | None = None
        self.readiness = Readiness("ready")

    def start(self, request):
        if self.refusal is not None:
            raise self.refusal
        generation = ScriptedGeneration(request, self.script)
        self.generations.append(generation)
        self.started.set()
        return generation

    def ready(self):
        return self.readiness

    def status(self):
        return {"ready": True, "workers": []}

    def requests(self):
        return [{"id": generation.request.id} for generation in self.generations]

    def request(self, request_id):
        return next((r for r in self.requests() if r["id"] == request_id), None)

    def render_metrics(self):
        return "diptych_build_info 1\n"


def one_by_one(text: str) -> list[tuple[int, ...]]:
    """A byte-level token per group."""
    return [(byte,) for byte in text.encode()]
