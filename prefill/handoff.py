"""The prefill worker's half of the handoff: from a job's submission to the receiver's ACK.

Owns one route per decode worker and the references that keep a job's rows alive while they may be
read. Promises: `on_done` comes exactly once per started key, always from the event loop and never
from inside a call of this class; when it comes the references are released. Every method belongs
to the event loop; none blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from cluster.errors import HandoffError
from cluster.kv.frames import blocks_per_frame, frame_size
from cluster.kv.hashing import chain_hashes
from prefill.route import Route, RouteOptions, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.kv.allocator import BlockLedger
    from cluster.kv.pool import KvPool
    from cluster.types import (
        AttemptKey,
        BlockId,
        GenerationJob,
        LinkStatus,
        TokenDelta,
        WorkerAddress,
        WorkerId,
    )
    from cluster.wire.session import Identity, SessionOptions

_STOP_PATIENCE_S = 1.0


class Handoff:
    """Moves finished rows to decode workers while the engine computes the next ones."""

    def __init__(  # noqa: PLR0913 - one plain value each
        self,
        me: Identity,
        options: SessionOptions,
        pool: KvPool,
        ledger: BlockLedger,
        *,
        block_size: int,
        frame_bytes: int,
        checksum: bool,
        on_done: Callable[[AttemptKey, HandoffError | None], None],
        seed_for: Callable[[str], bytes],
        host: str = "127.0.0.1",
    ) -> None:
        """`on_done` gets None after ACK, else why the KV did not arrive; `host` is for links."""
        block_bytes = pool.layout.block_bytes
        self._route_options = RouteOptions(
            me=me,
            session=options,
            pool=pool,
            block_size=block_size,
            slot_bytes=frame_size(blocks_per_frame(frame_bytes, block_bytes), block_bytes),
            checksum=checksum,
            host=host,
        )
        self._ledger = ledger
        self._block_size = block_size
        self._on_done = on_done
        self._seed_for = seed_for
        self._routes: dict[WorkerId, Route] = {}  # over ones too, until replaced
        self._held: dict[AttemptKey, tuple[Route, Transfer]] = {}
        self._num_releasing = 0  # over, but a gather may still read their rows
        self._bytes_of_old_routes = 0
        self._loop = asyncio.get_running_loop()

    # ---- numbers --------------------------------------------------------------------------------

    @property
    def open_transfers(self) -> int:
        """Started, and their references not yet released."""
        return len(self._held) + self._num_releasing

    @property
    def num_sessions(self) -> int:
        """Decode workers connected."""
        return sum(route.has_session for route in self._routes.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes of KV rows sent, headers not counted."""
        return self._bytes_of_old_routes + sum(r.bytes_sent for r in self._routes.values())

    def links(self) -> tuple[LinkStatus, ...]:
        """The last known link to each decode worker."""
        return tuple(route.status() for route in self._routes.values())

    # ---- for the worker -------------------------------------------------------------------------

    async def warm(self, decode: WorkerAddress) -> None:
        """Open session and link ahead of need.

        Raises:
            HandoffError: They cannot be opened.
        """
        route = self._route(decode)
        await route.settled.wait()
        if route.failure is not None:
            raise HandoffError(f"{decode.worker}: {route.failure}")

    def start(self, job: GenerationJob, decode: WorkerAddress) -> None:
        """Offer the job's KV to `decode`, connecting first if need be; repeats change nothing."""
        if job.key in self._held:
            return
        tokens = job.prompt_token_ids + job.forced_token_ids
        seed = self._seed_for(job.cache_salt)
        hashes = chain_hashes(tokens, block_size=self._block_size, seed=seed)
        route = self._route(decode)
        self._held[job.key] = route, route.start(job.key, len(tokens), tuple(hashes))

    def bind(self, key: AttemptKey, block_ids: Sequence[BlockId]) -> None:
        """The engine has given the job its blocks; takes references of its own."""
        held = self._held.get(key)
        if held is None:
            return
        route, transfer = held
        rows = tuple(block_ids)[: self._blocks(transfer.num_tokens)]
        self._ledger.share(rows)
        transfer.out.rows = rows
        route.pump()

    def progress(self, key: AttemptKey, computed_tokens: int) -> None:
        """KV of the first `computed_tokens` tokens is written: full rows of it may go."""
        held = self._held.get(key)
        if held is None:
            return
        route, transfer = held
        full = computed_tokens // self._block_size
        transfer.out.ready_blocks = min(
            max(transfer.out.ready_blocks, full), len(transfer.out.rows)
        )
        route.pump()

    def finish(self, key: AttemptKey, first_output: TokenDelta) -> None:
        """The prompt is complete: send the rest, the partial row included, then COMMIT."""
        held = self._held.get(key)
        if held is None:
            return
        route, transfer = held
        transfer.first_output = first_output
        transfer.out.ready_blocks = len(transfer.out.rows)
        transfer.out.is_complete = True
        route.pump()

    def cancel(self, key: AttemptKey) -> None:
        """Give the transfer up at a frame boundary; `on_done` follows with the references gone."""
        held = self._held.get(key)
        if held is not None:
            route, transfer = held
            route.give_up(transfer, "cancelled on the prefill worker")
            self._ended(transfer, HandoffError("cancelled"))

    async def stop(self) -> None:
        """End every route; what is still open fails."""
        routes = list(self._routes.values())
        for route in routes:
            route.close("the prefill worker stops")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(route.join() for route in routes)), _STOP_PATIENCE_S
            )

    # ---- inside ---------------------------------------------------------------------------------

    def _route(self, decode: WorkerAddress) -> Route:
        """The live route to this life of `decode`, new if there is none."""
        route = self._routes.get(decode.worker)
        if route is not None and route.failure is None and route.decode == decode:
            return route
        if route is not None:
            route.close(f"{decode.worker} has a new address")
            self._bytes_of_old_routes += route.bytes_sent
        route = Route(decode, self._route_options, self._ended)
        self._routes[decode.worker] = route
        route.open()
        return route

    def _ended(self, transfer: Transfer, error: HandoffError | None) -> None:
        """No more frames of this transfer will be announced; let go once none is being read."""
        del self._held[transfer.key]
        self._num_releasing += 1

        def on_quiet() -> None:  # on the loop or the link's thread; always acts a turn later
            self._loop.call_soon_threadsafe(self._let_go, transfer, error)

        transfer.out.access.close(on_quiet)

    def _let_go(self, transfer: Transfer, error: HandoffError | None) -> None:
        self._num_releasing -= 1
        self._ledger.release(transfer.out.rows)
        self._on_done(transfer.key, error)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
