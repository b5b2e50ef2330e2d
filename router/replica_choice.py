"""Serve's replica choice bent to our rule: the named worker, or nobody.

Wraps the alpha `RequestRouter` interface of Ray Serve. A handle call carries `target`, the
incarnation of a worker; it reaches exactly that replica or stays pending until its caller gives
up: it never falls back to another one. Every replica list that Serve sends is also the
membership of a pool, so it is copied into the process-wide `DIRECTORY`. Makes no decisions:
pairs of workers are chosen by the routing policy.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.types import Incarnation, Role, WorkerAddress, WorkerId
from router.directory import WorkerDirectory

DIRECTORY = WorkerDirectory()  # of this ingress process; Serve creates the routers, not we


def to_metadata(address: WorkerAddress) -> dict[str, str | int]:
    """The worker's address as the static metadata Serve spreads about a replica."""
    return {
        "worker": address.worker,
        "role": address.role.value,
        "incarnation": address.incarnation,
        "control": address.control,
        "pid": address.pid,
    }


def from_metadata(metadata: dict[str, Any]) -> WorkerAddress | None:
    """The address in a replica's metadata; None when it is no worker of ours."""
    try:
        return WorkerAddress(
            worker=WorkerId(metadata["worker"]),
            role=Role(metadata["role"]),
            incarnation=Incarnation(metadata["incarnation"]),
            control=metadata["control"],
            pid=int(metadata["pid"]),
        )
    except (KeyError, ValueError):
        return None


class TargetOrRefuse(RequestRouter):
    """Routes a call to the replica whose incarnation is `target`; copies the membership."""

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ANN401  # Serve's signature
        """Learn which pool this router serves, from `request_router_kwargs`."""
        self._role = Role(kwargs["role"])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank with the named replica, or nothing."""
        target = pending_request.kwargs.get("target") if pending_request else None
        return [
            [replica]
            for replica in candidate_replicas
            if replica.replica_metadata.get("incarnation") == target
        ]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's list and publish it as the pool's membership."""
        super().update_replicas(replicas)
        found = (from_metadata(replica.replica_metadata) for replica in replicas)
        listed = sorted((address for address in found if address), key=attrgetter("worker"))
        DIRECTORY.update(self._role, tuple(listed))
