"""200 requests at concurrency 32, a fifth of the clients leave: nobody else notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.cluster_process import running_cluster
from tests.support.storm import STAGES, Order, Storm, disconnect_storm, make_orders
from tests.support.tiny_models import build_tiny, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS = 200


def settings(model: str, **more: object) -> dict[str, object]:
    return {
        "model__id": model,
        "model__served_name": "m",
        "model__dtype": "float32",
        "pools__prefill__chunk_tokens": 32,
        **more,
    }


async def storm_of(model: str, token_ids: list[int], *args: str) -> None:
    """Ask an aggregated worker without a cache for the truth, then storm a split cluster."""
    orders = make_orders(token_ids, NUM_REQUESTS, seed=7)
    alone = settings(model, mode="aggregated", prefix_cache=False)
    with running_cluster(*args, **alone) as oracle:
        patient = [Order(order.prompt, order.max_tokens) for order in orders]
        expected = await Storm(oracle.url).run(patient)
    with running_cluster(*args, **settings(model)) as split:
        phases = await disconnect_storm(split, [text or "" for text in expected], orders)
    assert {stage for stage in STAGES if phases.get(stage)} == set(STAGES), phases


async def test_clients_leaving_at_every_stage_disturb_nobody(tmp_path: Path):
    folder = build_tiny("llama", tmp_path / "llama")
    await storm_of(str(folder), random_prompt(2000, seed=3))
