"""How many blocks a job needs, is promised, and can ever be given.

Pure arithmetic shared by the decode worker that gives tickets, its scheduler, and whoever has to
refuse a job that can never fit. The last sampled token needs no KV, hence the `- 1` in
`GenerationJob.total_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.types import GenerationJob

DEFAULT_HEADROOM_BLOCKS = 2


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold the KV of `num_tokens` tokens, the partial one included."""
    return -(-num_tokens // block_size)


def ticket_blocks(
    prompt_tokens: int,
    max_tokens: int,
    block_size: int,
    headroom_tokens: int | None = None,
) -> int:
    """Return the size of a decode ticket: the prompt and a head-room for its first output.

    Args:
        prompt_tokens: tokens whose KV exists before decode starts (prompt plus forced output).
        max_tokens: output tokens still allowed.
        block_size: tokens a block holds.
        headroom_tokens: output tokens promised beyond the prompt; two blocks by default.

    Returns:
        Blocks to promise, never more than the job can use.
    """
    if headroom_tokens is None:
        headroom_tokens = DEFAULT_HEADROOM_BLOCKS * block_size
    growth_tokens = min(headroom_tokens, max(max_tokens - 1, 0))
    return blocks_for(prompt_tokens + growth_tokens, block_size)


def can_ever_fit(job: GenerationJob, total_blocks: int, block_size: int) -> bool:
    """Say whether an otherwise empty pool of `total_blocks` could carry `job` to its end."""
    resumed_tokens = len(job.prompt_token_ids) + len(job.forced_token_ids)
    return blocks_for(max(job.total_tokens, resumed_tokens), block_size) <= total_blocks
