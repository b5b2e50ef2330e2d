"""Serve's replica choice bent to our rule: the named worker, or nobody.

Wraps the alpha `RequestRouter` interface of Ray Serve. A handle call carries `target`, the
incarnation of a worker; it reaches exactly that replica or fails: it never falls back to another
one. Every replica list that Serve sends is also the membership of a pool, so it is copied into
the process-wide directory. Makes no decisions: pairs of workers are chosen by the routing policy.
Serve pickles this module's classes and globals by value into other processes, so shared state
must live in, and be reached through, another module.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.errors import WorkerLostError
from cluster.shell import from_metadata
from cluster.types import Role
from router.directory import process_directory


class TargetOrRefuse(RequestRouter):  # type: ignore[misc]  # ray is not followed by mypy
    """Routes a call to the replica whose incarnation is `target`; copies the membership."""

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ANN401  # Serve's signature
        """Learn which pool this router serves, from `request_router_kwargs`."""
        self._role = Role(kwargs["role"])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The named replica alone; if it is not listed, the call fails at its caller.

        Serve asks again at once, without a pause, when it gets an empty answer, so a refusal
        settles the call's future and returns a candidate that Serve then finds unneeded.
        """
        if pending_request is None:
            return [candidate_replicas]
        target = pending_request.kwargs.get("target")
        named = [r for r in candidate_replicas if r.replica_metadata.get("incarnation") == target]
        if not named:
            if not pending_request.future.done():
                refusal = WorkerLostError(f"no replica with incarnation {target} is listed")
                pending_request.future.set_exception(refusal)
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if it is busy, ask again later
        return [named]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's list and publish it as the pool's membership."""
        super().update_replicas(replicas)
        found = (from_metadata(replica.replica_metadata) for replica in replicas)
        listed = sorted((address for address in found if address), key=attrgetter("worker"))
        process_directory().update(self._role, tuple(listed))
