"""What both streaming rivals do for a token: wait for the tick, yield one prepared chunk.

All streams of a process tick together, as a batch does. The chunk has the size and shape of the
product's own and is encoded once, which favours the rivals.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DONE = b"data: [DONE]\n\n"


def token_chunk() -> bytes:
    """One token as a server-sent event."""
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "smollm2-135m-instruct",
        "system_fingerprint": "fp_0123456789abcdef",
        "choices": [choice],
        "usage": None,
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def ticks(num_tokens: int, tokens_per_s: float) -> AsyncIterator[None]:
    """Yield at the process' common ticks, `num_tokens` times."""
    loop = asyncio.get_running_loop()
    period_s = 1 / tokens_per_s
    due_s = (loop.time() // period_s + 1) * period_s
    for _ in range(num_tokens):
        await asyncio.sleep(due_s - loop.time())
        yield
        due_s += period_s
