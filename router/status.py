"""The `status --json` object: the whole cluster as one ingress knows it.

Built from the sessions' latest snapshots only; nothing is asked of anyone. A worker whose session
ended stays listed as dead, with its last figures, until its successor appears.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster.types import LinkStatus, ModelFacts, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.sessions import Peer


@dataclass(frozen=True, slots=True)
class IngressFacts:
    """What this ingress says of itself and the cluster."""

    id: str
    pid: int
    mode: str


def status_object(
    ingress: IngressFacts, facts: ModelFacts, peers: Sequence[Peer], *, ready: bool
) -> dict[str, Any]:
    """All keys of the interface, for every listed worker."""
    return {
        "ready": ready,
        "mode": ingress.mode,
        "model": facts.served_name,
        "revision": facts.revision,
        "redis": {"url": None, "pid": None, "state": "off"},
        "ingresses": [{"id": ingress.id, "pid": ingress.pid}],
        "workers": [_worker(peer) for peer in peers],
        "links": [_link(peer, link) for peer in peers for link in _links(peer)],
    }


def _worker(peer: Peer) -> dict[str, Any]:
    address, snapshot = peer.address, peer.snapshot
    if peer.alive and snapshot is not None:
        state = WorkerState.DRAINING if peer.leaving else snapshot.state
    else:
        state = WorkerState.DEAD if peer.lost else WorkerState.STARTING
    entry: dict[str, Any] = {
        "id": address.worker,
        "role": address.role.value,
        "pid": address.pid,
        "incarnation": address.incarnation,
        "state": state.value,
        "control": address.control,
    }
    if snapshot is None:
        return entry | _NO_FIGURES
    counts = asdict(snapshot.blocks)
    return entry | {
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "blocks": {name: counts[name] for name in ("total", "free", "loading", "live", "cached")},
        "tickets": snapshot.tickets,
        "open_transfers": snapshot.open_transfers,
        "sessions": snapshot.sessions,
        "prefill_tokens": snapshot.prefill_tokens,
        "generated_tokens": snapshot.generated_tokens,
        "handoff_bytes_sent": snapshot.handoff_bytes_sent,
        "handoff_bytes_received": snapshot.handoff_bytes_received,
        "preemptions": snapshot.preemptions,
        "threads": snapshot.threads,
        "fds": snapshot.fds,
        "rss_bytes": snapshot.rss_bytes,
        "start_phases_s": snapshot.start_phases_s,
    }


_NO_FIGURES: dict[str, Any] = {
    "running": 0,
    "waiting": 0,
    "blocks": {"total": 0, "free": 0, "loading": 0, "live": 0, "cached": 0},
    "tickets": 0,
    "open_transfers": 0,
    "sessions": 0,
    "prefill_tokens": 0,
    "generated_tokens": 0,
    "handoff_bytes_sent": 0,
    "handoff_bytes_received": 0,
    "preemptions": 0,
    "threads": 0,
    "fds": 0,
    "rss_bytes": 0,
    "start_phases_s": {},
}


def _links(peer: Peer) -> Sequence[LinkStatus]:
    return () if peer.snapshot is None or not peer.alive else peer.snapshot.links


def _link(peer: Peer, link: LinkStatus) -> dict[str, Any]:
    return {
        "prefill": peer.address.worker,
        "decode": link.decode,
        "transport": link.transport,
        "state": link.state,
        "epoch": link.epoch,
        "gb_per_s": link.gb_per_s,
    }
