"""A model small enough to reason about, with real KV: it shows every wrong row.

The KV of a position is a digest of all tokens up to it. The next token is a digest of the KV of
all positions, read back through the block table, so a wrong, stale or overwritten row changes the
output. `oracle` computes the same without any pool.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cluster.model.step import StepBatch, StepResult, finish_reason
from cluster.types import AttemptKey, GenerationJob, RequestId, SamplingParams

if TYPE_CHECKING:
    from cluster.kv.allocator import BlockLedger

VOCAB = 6
EOS = 5


def make_job(name, prompt, max_tokens, *, eos=False, forced=(), salt="", attempt=1, min_tokens=0):
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=len(prompt),
        min_tokens=min_tokens,
        eos_token_ids=(EOS,) if eos else (),
    )
    return GenerationJob(
        key=AttemptKey(RequestId(name), attempt),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        cache_salt=salt,
        forced_token_ids=tuple(forced),
    )


def seed_for(salt):
    return b"seed:" + salt.encode()


class ChainModel:
    """Runner over an imaginary pool; fails when a registered row is written."""

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self._kv: dict[tuple[int, int], bytes] = {}
        self.sizes: list[int] = []  # tokens of each step

    def stop(self) -> None:
        pass

    def run(self, batch: StepBatch) -> StepResult:
        self.sizes.append(batch.num_tokens)
        return StepResult(tuple(self._run_slice(piece) for piece in batch.slices), 0.001)

    def _run_slice(self, piece):
        assert piece.token_ids
        size = self._ledger.block_size
        assert len(piece.block_ids) == -(-piece.end // size)
        context = self.read(piece.block_ids, piece.start)
        context = self.write(piece.block_ids, piece.token_ids, context)
        if piece.sample is None:
            return None
        return _draw(context, piece.sample.params, piece.sample.position)

    def read(self, block_ids, num_tokens):
        size = self._ledger.block_size
        return [self._kv[block_ids[at // size], at % size] for at in range(num_tokens)]

    def write(self, block_ids, token_ids, context=()):
        context = list(context)
        size = self._ledger.block_size
        for token in token_ids:
            block = block_ids[len(context) // size]
            assert not self._ledger._prefix.is_registered(block), "a shared row was written"
            context.append(_kv(context, token))
            self._kv[block, (len(context) - 1) % size] = context[-1]
        return context


def oracle(job, *, num_tokens=None):
    """Output of `job` beyond its forced tokens, by the definition of the model."""
    context: list[bytes] = []
    for token in (*job.prompt_token_ids, *job.forced_token_ids):
        context.append(_kv(context, token))
    output = list(job.forced_token_ids)
    while num_tokens is None or len(output) < len(job.forced_token_ids) + num_tokens:
        token = _draw(context, job.sampling, len(output))
        output.append(token)
        if finish_reason(job.sampling, len(output), token) is not None:
            break
        context.append(_kv(context, token))
    return output[len(job.forced_token_ids) :]


def _kv(context, token):
    before = context[-1] if context else b""
    return hashlib.blake2b(before + bytes([token]), digest_size=8).digest()


def _draw(context, params, position):
    text = b"".join(context) + f"{params.seed}/{position}".encode()
    return hashlib.blake2b(text, digest_size=8).digest()[0] % VOCAB
