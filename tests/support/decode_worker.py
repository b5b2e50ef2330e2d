"""A decode worker without threads or wires: ledger, scheduler and chain model, stepped by hand."""

from __future__ import annotations

from cluster.kv.allocator import BlockLedger
from cluster.kv.hashing import chain_hashes
from cluster.kv.tickets import ticket_blocks
from cluster.types import AttemptKey, RequestId
from decode.scheduler import DecodeScheduler
from tests.support.chain_model import ChainModel, oracle, seed_for

BLOCK = 4


class DecodeWorker:
    """Plays the receiver, the prefill worker and the engine; time is a plain number."""

    def __init__(self, *, blocks=64, chunk=8, max_running=8, prefix_cache=True):
        self.ledger = BlockLedger(blocks, BLOCK, prefix_cache=prefix_cache)
        self.scheduler = DecodeScheduler(
            self.ledger,
            block_size=BLOCK,
            chunk_tokens=chunk,
            max_running=max_running,
            seed_for=seed_for,
        )
        self.model = ChainModel(self.ledger)
        self.now_s = 0.0

    def reserve(self, job, headroom=None):
        """Promise a ticket as the receiver would; False without room."""
        num_tokens = len(job.prompt_token_ids) + len(job.forced_token_ids)
        left = job.sampling.max_tokens - len(job.forced_token_ids)
        return self.ledger.promise(job.key, ticket_blocks(num_tokens, left, BLOCK, headroom))

    def accept(self, job):
        """Bind cached blocks and rows to be received; returns what `arrive` needs."""
        tokens = (*job.prompt_token_ids, *job.forced_token_ids)
        hashes = chain_hashes(tokens, block_size=BLOCK, seed=seed_for(job.cache_salt))
        held = self.ledger.match(hashes, ticket=job.key)
        num_fresh = -(-len(tokens) // BLOCK) - len(held)
        fresh = self.ledger.begin_loading(job.key, num_fresh, ticket=job.key)
        assert fresh is not None, "the ticket covers the prompt"
        return held, fresh

    def arrive(self, job, held, fresh):
        """The rows are complete: the sequence joins with its first token."""
        tokens = (*job.prompt_token_ids, *job.forced_token_ids)
        blocks = held + fresh
        context = self.model.read(blocks, len(held) * BLOCK)
        self.model.write(blocks, tokens[len(context) :], context)
        assert self.ledger.finish_loading(job.key) == fresh
        (first,) = oracle(job, num_tokens=1)
        self.scheduler.attach(job, blocks, first, self.now_s)

    def attach(self, job, headroom=None):
        """Do a whole handoff at once."""
        assert self.reserve(job, headroom)
        self.arrive(job, *self.accept(job))

    def add_local(self, job, headroom=None):
        """Queue a job with a ticket for local prefill."""
        assert self.reserve(job, headroom)
        self.scheduler.add_local(job, self.now_s)

    def step(self):
        """Run one step of one second."""
        batch = self.scheduler.schedule(self.now_s)
        assert batch is not None
        return self.finish(batch)

    def finish(self, batch):
        """Run a planned step."""
        result = self.model.run(batch)
        self.now_s += 1.0
        outputs = self.scheduler.complete(batch, result, self.now_s)
        self.check()
        return outputs

    def run(self):
        """Step until idle; returns every output in order."""
        outputs = []
        while not self.scheduler.is_idle:
            outputs.extend(self.step())
        return outputs

    def check(self):
        """Check every invariant."""
        self.ledger.check_integrity()
        self.scheduler.check_integrity()


def key_of(name):
    return AttemptKey(RequestId(name), 1)


def tokens_of(outputs):
    """Token ids by request; positions must follow each other."""
    tokens: dict[str, list[int]] = {}
    positions: dict[str, int] = {}
    for out in outputs:
        name = out.key.request
        assert positions.get(name, out.position) == out.position
        positions[name] = out.position + 1
        tokens.setdefault(name, []).append(out.token_id)
    return tokens


def assert_quiet(worker):
    worker.check()
    counts = worker.ledger.counts()
    assert worker.scheduler.is_idle
    assert counts.free + counts.cached == counts.total
    assert counts.promised == 0
