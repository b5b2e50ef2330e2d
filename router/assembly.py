"""From the config to a running token layer: how an ingress is put together.

Used by the Serve ingress, by `--local` and by tests alike, so that all three run the same objects.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from cluster.assembly import session_options
from cluster.types import Incarnation, ModelFacts, Role, WorkerId
from cluster.wire.session import Identity
from router.flow import Flow, FlowObserver, FlowSettings
from router.policy import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config import Config
    from router.directory import WorkerDirectory
    from router.status import IngressFacts


def build_flow(
    config: Config,
    facts: ModelFacts,
    directory: WorkerDirectory,
    *,
    secret: bytes,
    ingress: IngressFacts,
    observer: FlowObserver,
    render: Callable[[], str],
) -> Flow:
    """Build the flow of one ingress; its `run` must then be kept running."""
    settings = FlowSettings(
        ingress=ingress,
        is_disaggregated=config.is_disaggregated,
        prefill_pool_tokens=config.pools.prefill.kv_blocks * config.block_size,
        decode_pool_tokens=config.pools.decode.kv_blocks * config.block_size,
        local_prefill_max_tokens=config.routing.local_prefill_max_tokens,
        max_waiting=config.admission.max_queue,
        queue_timeout_s=config.admission.queue_timeout_s,
    )
    me = Identity(
        role=Role.INGRESS,
        peer=WorkerId(ingress.id),
        incarnation=Incarnation(secrets.token_hex(8)),
        layout={"fingerprint": facts.fingerprint},
    )
    return Flow(
        settings,
        facts,
        me,
        session_options(config, secret),
        directory,
        LeastLoaded(),
        observer=observer,
        render=render,
    )
