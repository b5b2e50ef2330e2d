"""Attention over the paged pool, plugged into unmodified Hugging Face models.

Owns the one function every attention layer calls and the per-step metadata it reads. New K and V
are written into the pool first; decode rows then attend to gathered blocks in padded groups, each
prefill chunk on its own. No state outlives a step: `PagedStep` is built by the runner and passed
through the model call as a keyword. Never decides what runs, and never touches the ledger.

Shapes, used by every comment in `cluster/model`:

    T            num_tokens          new tokens of the step, all slices packed in order
    R            num_rows            rows of one call: decode rows of a group (one token each),
                                     or new tokens of one chunk
    H, Hk        heads, kv_heads     query heads and KV heads; group size G = H / Hk
    D, Dv        head_dim            of Q and K, and of V
    L            context             positions attended to, padded to the longest of a group
    query        [1, H, T, D]        after RoPE, from the model
    key, value   [1, Hk, T, D|Dv]    after RoPE, from the model
    K pool       [num_blocks, block_size, Hk, D]       strided view, one per layer
    block table  [R, blocks] or [blocks]               int64 rows of the pool
    result       [1, T, H, Dv]       what the model expects back
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from cluster.kv.layout import LayerShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.kv.pool import KvPool
    from cluster.model.step import StepBatch, StepSlice

IMPLEMENTATION = "diptych_paged"


@dataclass(slots=True)
class KvProbe:
    """Stands in for a `PagedStep` at load time and notes the KV shape every layer produces."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)  # by layer index


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length that attend together, padded to the longest."""

    rows: torch.Tensor | None  # [R] int64 packed positions; None: all tokens of the step, in order
    table: torch.Tensor  # [R, blocks] int64; short tables repeat their own first block
    positions: torch.Tensor  # [R] int64 absolute position of each row's token
    context: int  # L = longest position + 1
    even: bool  # all rows have exactly L positions, so nothing is padding


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one prompt, attending to their own sequence only."""

    first_row: int  # packed position of its first token
    num_rows: int
    start: int  # absolute position of its first token = context already in the pool
    table: torch.Tensor  # [blocks] int64


@dataclass(frozen=True, slots=True)
class PagedStep:
    """All that attention must know of one step."""

    pool: KvPool
    slot_blocks: torch.Tensor  # [T] int64 pool row each new token's KV goes to
    slot_offsets: torch.Tensor  # [T] int64 position within that row
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    # Additive masks of this step by (piece, window, dtype): layers share them.
    masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a model family asks of its attention beyond plain causal softmax."""

    scaling: float | None  # None: 1 / sqrt(D)
    window: int | None  # key visible iff k_pos > q_pos - window
    softcap: float | None
    sinks: torch.Tensor | None  # [H] logits that take part in softmax and then vanish


def paged_attention(  # noqa: PLR0913 - the caller's signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | KvProbe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """Attend; the signature is the one `transformers` calls, see the glossary for shapes."""
    assert attention_mask is None, "the packed batch carries no mask"
    layer = int(module.layer_idx)
    rule = _Rule(scaling, sliding_window, softcap, s_aux)
    if isinstance(paged, KvProbe):
        paged.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        mask = None if sliding_window is None else _causal_mask(query, 0, sliding_window)
        out = _attend(query, key, value, rule, mask, causal=mask is None)
        return out.transpose(1, 2), None
    k_pool, v_pool = paged.pool.k(layer), paged.pool.v(layer)
    k_pool[paged.slot_blocks, paged.slot_offsets] = key[0].transpose(0, 1)
    v_pool[paged.slot_blocks, paged.slot_offsets] = value[0].transpose(0, 1)
    pieces = [
        (group.rows, _decode(paged, index, query, k_pool, v_pool, rule))
        for index, group in enumerate(paged.groups)
    ]
    pieces += [
        (None, _prefill(paged, index, query, key, value, k_pool, v_pool, rule))
        for index in range(len(paged.chunks))
    ]
    return _join(paged, pieces, query, value.shape[3]), None


def _join(
    paged: PagedStep,
    pieces: Sequence[tuple[torch.Tensor | None, torch.Tensor]],  # each piece [R, H, Dv]
    query: torch.Tensor,
    v_dim: int,
) -> torch.Tensor:
    """Put the pieces back into packed order, `[1, T, H, Dv]`."""
    if len(pieces) == 1:
        return pieces[0][1].unsqueeze(0)
    out = query.new_empty(query.shape[2], query.shape[1], v_dim)
    num_groups = len(paged.groups)
    for rows, piece in pieces[:num_groups]:
        out[rows] = piece
    for chunk, (_, piece) in zip(paged.chunks, pieces[num_groups:], strict=True):
        out[chunk.first_row : chunk.first_row + chunk.num_rows] = piece
    return out.unsqueeze(0)


def _decode(
    paged: PagedStep,
    index: int,
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rule: _Rule,
) -> torch.Tensor:
    """Attend one group of decode rows; returns `[R, H, Dv]`."""
    group = paged.groups[index]
    picked = query[0].transpose(0, 1)  # [T, H, D]
    if group.rows is not None:
        picked = picked[group.rows]
    num_rows, heads, dim = picked.shape
    kv_heads = k_pool.shape[2]
    # Query heads of one KV head become query rows: K and V are never repeated.
    grouped = picked.reshape(num_rows, kv_heads, heads // kv_heads, dim)
    mask = None
    if not (group.even and _covers(rule.window, group.context)):
        mask = _cached(paged, index, rule.window, query.dtype, group.positions, group.context)
        mask = mask[:, None, None, :]  # [R, 1, 1, L]
    key = _gather(k_pool, group.table, group.context)  # [R, Hk, L, D]
    value = _gather(v_pool, group.table, group.context)
    if rule.softcap is None and rule.sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=rule.scaling
        )
    else:
        each = picked.unsqueeze(2)  # [R, H, 1, D]
        return _attend(each, key, value, rule, mask, causal=False).squeeze(2)
    return out.reshape(num_rows, heads, -1)


def _prefill(
    paged: PagedStep,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rule: _Rule,
) -> torch.Tensor:
    """Attend one chunk; returns `[R, H, Dv]`."""
    chunk = paged.chunks[index]
    rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
    context = chunk.start + chunk.num_rows
    mask = None
    if chunk.start > 0 or not _covers(rule.window, context):
        positions = torch.arange(chunk.start, context)
        piece = len(paged.groups) + index
        mask = _cached(paged, piece, rule.window, query.dtype, positions, context)  # [R, L]
    if chunk.start == 0:
        keys, values = key[:, :, rows], value[:, :, rows]  # all there is was just computed
    else:
        keys = _gather(k_pool, chunk.table[None], context)  # [1, Hk, L, D]
        values = _gather(v_pool, chunk.table[None], context)
    out = _attend(query[:, :, rows], keys, values, rule, mask, causal=mask is None)
    return out[0].transpose(0, 1)


def _attend(
    query: torch.Tensor,  # [R', H, n, D]
    key: torch.Tensor,  # [R', Hk, L, D]
    value: torch.Tensor,  # [R', Hk, L, Dv]
    rule: _Rule,
    mask: torch.Tensor | None,  # additive, broadcastable to [R', 1, n, L]
    *,
    causal: bool,
) -> torch.Tensor:
    """Attend `n` query positions a row; returns `[R', H, n, Dv]`."""
    if rule.softcap is None and rule.sinks is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=rule.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    if causal and mask is None:
        mask = _causal_mask(query, key.shape[2] - query.shape[2], None)
    num_rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(num_rows, kv_heads, heads // kv_heads, length, dim)
    scale = dim**-0.5 if rule.scaling is None else rule.scaling
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * scale  # [R', Hk, G, n, L]
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + (mask.unsqueeze(2) if mask.dim() == 4 else mask)
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).reshape(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(num_rows, -1, -1, length, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if rule.sinks is not None:
        weights = weights[..., :-1]
    out = weights @ value.unsqueeze(2)  # [R', Hk, G, n, Dv]
    return out.reshape(num_rows, heads, length, -1)


def _covers(window: int | None, context: int) -> bool:
    """Say whether a window hides nothing of `context` positions."""
    return window is None or window >= context


def _gather(pool: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """Copy the first `context` positions of each table out of a layer's pool, `[R, Hk, L, D]`."""
    num_rows, num_blocks = table.shape
    blocks = torch.index_select(pool, 0, table.reshape(-1))
    flat = blocks.view(num_rows, num_blocks * pool.shape[1], *pool.shape[2:])
    return flat[:, :context].transpose(1, 2)


def _visible(positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
    """Which of `context` keys each query position sees, bool `[R, L]`."""
    keys = torch.arange(context)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a visibility mask into what is added to scores: 0 or -inf."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _causal_mask(query: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """Additive mask `[n, L]` of `n` queries that follow `start` positions of context."""
    end = start + query.shape[2]
    return _additive(_visible(torch.arange(start, end), end, window), query.dtype)


def _cached(
    paged: PagedStep,
    piece: int,
    window: int | None,
    dtype: torch.dtype,
    positions: torch.Tensor,
    context: int,
) -> torch.Tensor:
    """Return the additive mask `[R, L]` of one piece, built once a step and window."""
    found = paged.masks.get((piece, window, dtype))
    if found is None:
        found = _additive(_visible(positions, context, window), dtype)
        paged.masks[piece, window, dtype] = found
    return found


# ---- building the metadata of a step -------------------------------------------------------------


def build_step(pool: KvPool, batch: StepBatch) -> PagedStep:
    """Turn the scheduler's slices into the index tensors of one step."""
    block_size = pool.layout.block_size
    slot_blocks: list[int] = []
    slot_offsets: list[int] = []
    decode: list[tuple[int, StepSlice]] = []  # (packed position, slice)
    chunks: list[Chunk] = []
    row = 0
    for piece in batch.slices:
        for position in range(piece.start, piece.end):
            slot_blocks.append(piece.block_ids[position // block_size])
            slot_offsets.append(position % block_size)
        if len(piece.token_ids) == 1:
            decode.append((row, piece))
        else:
            used = piece.block_ids[: -(-piece.end // block_size)]
            chunks.append(Chunk(row, len(piece.token_ids), piece.start, torch.tensor(used)))
        row += len(piece.token_ids)
    groups = tuple(
        _make_group(members, block_size, num_tokens=row) for members in _by_length(decode)
    )
    return PagedStep(
        pool=pool,
        slot_blocks=torch.tensor(slot_blocks),
        slot_offsets=torch.tensor(slot_offsets),
        groups=groups,
        chunks=tuple(chunks),
    )


def _by_length(decode: list[tuple[int, StepSlice]]) -> Iterator[list[tuple[int, StepSlice]]]:
    """Split rows into groups whose longest is at most about twice the shortest."""
    if not decode:
        return
    ends = [piece.end for _, piece in decode]
    if max(ends) <= 2 * min(ends) + 64:  # the usual case keeps the packed order
        yield decode
        return
    group: list[tuple[int, StepSlice]] = []
    for row, piece in sorted(decode, key=lambda item: item[1].end):
        if group and piece.end > 2 * group[0][1].end + 64:
            yield group
            group = []
        group.append((row, piece))
    yield group


def _make_group(
    members: list[tuple[int, StepSlice]], block_size: int, *, num_tokens: int
) -> DecodeGroup:
    rows = [row for row, _ in members]
    ends = [piece.end for _, piece in members]
    width = -(-max(ends) // block_size)
    table = []
    for _, piece in members:
        used = piece.block_ids[: -(-piece.end // block_size)]
        # Padding repeats a block of the same sequence: whatever it holds cannot reach others.
        table.append([*used, *[used[0]] * (width - len(used))])
    return DecodeGroup(
        rows=None if rows == list(range(num_tokens)) else torch.tensor(rows),
        table=torch.tensor(table),
        positions=torch.tensor(ends) - 1,
        context=max(ends),
        even=min(ends) == max(ends),
    )
