"""Typed messages of the sessions: ingress to worker, and prefill to decode worker.

Each message is a frozen msgspec struct with a tag; `Envelope` adds the call numbering that
`session.py` uses. Encoding is msgpack, never pickle; unknown tags and fields of the wrong type
are refused by the decoder. Requests and their answers are named in each docstring.
"""

from __future__ import annotations

import msgspec

from cluster.types import (
    AttemptKey,
    BlockHash,
    GenerationJob,
    Incarnation,
    Role,
    TokenDelta,
    TransferId,
    WorkerAddress,
    WorkerId,
    WorkerSnapshot,
)

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything a session carries; the tag is the class name."""


# ---- opening a session (either pairing) -------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of both sides. `layout` fields must be equal for a prefill-decode pair."""

    protocol: int
    role: Role
    peer: WorkerId  # an ingress uses its own id here
    incarnation: Incarnation
    nonce: bytes  # 16 random bytes, to be proven by the other side
    layout: dict[str, str]  # "fingerprint", "block_size", "kv_dtype", "num_layers", ...


class Proof(Message, frozen=True):
    """HMAC-SHA256(secret, role | both nonces): each side proves it knows the cluster secret."""

    mac: bytes


class Refuse(Message, frozen=True):
    """The handshake failed; `reason` names the field and both values."""

    reason: str


class Heartbeat(Message, frozen=True):
    """Sent once a second by both sides; carries nothing, only its arrival counts."""


# ---- ingress -> worker ------------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """Ingress to decode: promise room for this job. Answer: Reserved or Refused."""

    job: GenerationJob


class Reserved(Message, frozen=True):
    """The ticket exists; it is held until used, cancelled, expired or the session dies."""

    key: AttemptKey
    ticket_blocks: int


class Refused(Message, frozen=True):
    """The worker will not take the job now (`retry_after_s`) or ever (None)."""

    key: AttemptKey
    code: str
    reason: str
    retry_after_s: float | None


class SubmitPrefill(Message, frozen=True):
    """Ingress to prefill: compute the prompt. Answer: Accepted or Refused.

    With `decode` the KV goes there and token 1 comes back at once; without it (max_tokens is 1)
    the job ends with token 1.
    """

    job: GenerationJob
    decode: WorkerAddress | None


class SubmitLocal(Message, frozen=True):
    """Ingress to decode: prefill and decode here. Answer: Accepted or Refused."""

    job: GenerationJob


class Accepted(Message, frozen=True):
    """The job is queued on the worker."""

    key: AttemptKey


class Cancel(Message, frozen=True):
    """Stop the attempt and free all it holds. No answer; unknown keys leave a tombstone."""

    key: AttemptKey


# ---- worker -> ingress ------------------------------------------------------------------------


class Tokens(Message, frozen=True):
    """All new tokens of one engine step for one ingress."""

    deltas: tuple[TokenDelta, ...]


class Failed(Message, frozen=True):
    """The attempt ended on this worker without finishing; everything it held is freed."""

    key: AttemptKey
    code: str
    message: str


class Snapshot(Message, frozen=True):
    """The worker's state, after every heartbeat interval and on notable change."""

    snapshot: WorkerSnapshot


# ---- prefill <-> decode: the transfer protocol (DESIGN section 5) ------------------------------


class Offer(Message, frozen=True):
    """P has taken the job and will produce these blocks. Answer on the session: Accept, Reject."""

    transfer: TransferId
    key: AttemptKey
    num_tokens: int  # prompt tokens
    block_hashes: tuple[BlockHash, ...]  # of the full blocks, chain order


class Accept(Message, frozen=True):
    """D has bound block ids; P sends rows from the block that holds `first_token` on."""

    transfer: TransferId
    first_token: int  # first token D lacks, a multiple of the block size


class Reject(Message, frozen=True):
    """D will not take the transfer; P drops it and tells nobody but its log and counters."""

    transfer: TransferId
    reason: str


class NextFrame(Message, frozen=True):
    """The data plane's next message, announced before it is posted; sizes must match exactly."""

    transfer: TransferId
    epoch: int
    frame: int  # 0-based within the transfer
    first_block: int  # index within the sequence, not a row
    num_blocks: int
    num_bytes: int  # header plus rows, exactly what D must post


class Commit(Message, frozen=True):
    """All frames are out. D verifies the manifest before anything becomes visible."""

    transfer: TransferId
    key: AttemptKey
    num_frames: int
    num_blocks: int  # sent, not held by D before
    num_tokens: int
    first_output: TokenDelta  # token 1, echoing the attempt's key


class Ack(Message, frozen=True):
    """D owns a verified copy; P may let go of its blocks."""

    transfer: TransferId


class Abort(Message, frozen=True):
    """Either side gives the transfer up; announced frames are still sent, then ignored."""

    transfer: TransferId
    reason: str


class OpenLink(Message, frozen=True):
    """P asks for a data plane. Answer: LinkReady or LinkRefused, once D has joined it."""

    transport: str


class LinkEpoch(Message, frozen=True):
    """D names the epoch of the link about to be built; an older one is superseded."""

    epoch: int
    transport: str
    slot_bytes: int  # largest frame D can receive


class StoreSet(Message, frozen=True):
    """Rendezvous of the process group: the peer set a key."""

    epoch: int
    key: str
    value: bytes


Any = (
    Hello
    | Proof
    | Refuse
    | Heartbeat
    | Reserve
    | Reserved
    | Refused
    | SubmitPrefill
    | SubmitLocal
    | Accepted
    | Cancel
    | Tokens
    | Failed
    | Snapshot
    | Offer
    | Accept
    | Reject
    | NextFrame
    | Commit
    | Ack
    | Abort
    | OpenLink
    | LinkEpoch
    | StoreSet
)


class Envelope(msgspec.Struct, frozen=True):
    """What travels: a message, a call number if an answer is expected, or the call it answers."""

    body: Any
    call: int | None = None
    reply_to: int | None = None
