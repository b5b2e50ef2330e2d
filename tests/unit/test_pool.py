"""The pool's rows and views are the same memory, and moving rows moves everything."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import ModelError
from cluster.kv.layout import KvLayout, LayerShape
from cluster.kv.pool import KvPool
from cluster.types import BlockId

LAYOUT = KvLayout(
    layers=(LayerShape(2, 8, 2, 8), LayerShape(1, 12, 1, 4)), dtype="bfloat16", block_size=4
)


def ids(*rows: int) -> list[BlockId]:
    return [BlockId(row) for row in rows]


def filled(num_blocks: int) -> KvPool:
    pool = KvPool(LAYOUT, num_blocks)
    pool.rows.random_(0, 120)
    return pool


def test_a_row_holds_every_layer() -> None:
    assert LAYOUT.block_bytes == 4 * (2 * 8 + 2 * 8 + 12 + 4) * 2
    assert KvPool(LAYOUT, 3).rows.shape == (3, LAYOUT.block_bytes)


def test_smollm2_block_is_368640_bytes() -> None:
    layout = KvLayout((LayerShape(3, 64, 3, 64),) * 30, "bfloat16", 16)
    assert layout.block_bytes == 368_640


def test_views_tile_the_rows_without_overlap() -> None:
    pool = KvPool(LAYOUT, 5)
    pool.check_integrity()
    views = [view for layer in range(2) for view in (pool.k(layer), pool.v(layer))]
    assert [tuple(view.shape) for view in views] == [
        (5, 4, 2, 8),
        (5, 4, 2, 8),
        (5, 4, 1, 12),
        (5, 4, 1, 4),
    ]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert (view == number).all()
    assert (pool.rows.view(torch.bfloat16) > 0).all()


def test_rows_travel_between_pools() -> None:
    source, target = filled(6), KvPool(LAYOUT, 9)
    buffer = torch.empty(3, LAYOUT.block_bytes, dtype=torch.uint8)
    source.gather(ids(5, 0, 3), buffer)
    target.scatter(ids(1, 8, 2), buffer)
    for layer in range(2):
        assert torch.equal(target.k(layer)[[1, 8, 2]], source.k(layer)[[5, 0, 3]])
        assert torch.equal(target.v(layer)[[1, 8, 2]], source.v(layer)[[5, 0, 3]])
    untouched = [0, 3, 4, 5, 6, 7]
    assert (target.rows[untouched] == 0).all()


def test_a_part_of_a_larger_buffer_serves() -> None:
    pool = filled(4)
    ring = torch.zeros(8, LAYOUT.block_bytes, dtype=torch.uint8)
    pool.gather(ids(2, 1), ring[3:5])
    assert torch.equal(ring[3:5], pool.rows[[2, 1]])
    assert (ring[:3] == 0).all()


def test_ids_outside_the_pool_are_refused_before_anything_is_copied() -> None:
    pool = filled(4)
    before = pool.rows.clone()
    for bad in (ids(0, 4), ids(-1, 0)):
        with pytest.raises(IndexError):
            pool.scatter(bad, torch.zeros(2, LAYOUT.block_bytes, dtype=torch.uint8))
    assert torch.equal(pool.rows, before)


def test_a_buffer_of_another_shape_is_refused() -> None:
    pool = filled(4)
    with pytest.raises(ValueError, match="row buffer"):
        pool.gather(ids(0, 1), torch.zeros(3, LAYOUT.block_bytes, dtype=torch.uint8))


def test_too_large_a_pool_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match=r"1000000000000 blocks \(\d+\.\d GB\)"):
        KvPool(LAYOUT, 10**12)


def test_the_handshake_sees_every_difference() -> None:
    base = LAYOUT.describe()
    others = (
        KvLayout(LAYOUT.layers, "float16", 4),
        KvLayout(LAYOUT.layers, "bfloat16", 8),
        KvLayout(LAYOUT.layers[:1], "bfloat16", 4),
        KvLayout(LAYOUT.layers[::-1], "bfloat16", 4),
    )
    assert all(other.describe() != base for other in others)
    assert KvLayout(LAYOUT.layers, "bfloat16", 4).describe() == base
