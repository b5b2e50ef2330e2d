"""The sections of the config file: keys, types, bounds and defaults.

One frozen pydantic model a section, in the file's order. `cluster/config.py` joins them, reads
files and explains mistakes; this module only says what a valid value is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Mode = Literal["disaggregated", "aggregated"]


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, no coercion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ClusterSection(Section):
    """`cluster`: which cluster this is; the name keys runtime files and stored data."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")] = "laptop"


class ModelSection(Section):
    """`model`: what is served and how it is held in memory."""

    id: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"  # alias, folder or hub id
    revision: str | None = None
    served_name: str | None = None  # defaults to the last part of `id`
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_len: Positive | None = None  # tokens; None: what the model was trained for


class TimedSection(Section):
    """`timed`: step costs of `engine: timed`, seconds as polynomials of the work in a step."""

    prefill_a_s: Seconds = 0.002
    prefill_b_s_per_token: Seconds = 0.0001
    prefill_c_s_per_token2: Seconds = 0.0
    decode_a_s: Seconds = 0.02
    decode_b_s_per_seq: Seconds = 0.0002
    decode_c_s_per_ctx_token: Seconds = 0.0
    seed: int = 0


class PoolSection(Section):
    """`pools.<role>`: one pool of identical workers."""

    replicas: NonNegative = 1
    tp: Positive = 1
    threads: Positive | None = None  # compute threads a worker; None: cores // workers
    kv_blocks: Annotated[int, Field(ge=2)] = 1024  # blocks of `block_size` tokens a worker
    chunk_tokens: Positive = 512  # prompt tokens in one step
    max_running: Positive = 64  # sequences in one step


class DecodePoolSection(PoolSection):
    """`pools.decode`: nothing can be generated without a decode worker."""

    replicas: Positive = 1


class PoolsSection(Section):
    """`pools`: the two pools; `mode: aggregated` uses `decode` alone."""

    prefill: PoolSection = PoolSection()
    decode: DecodePoolSection = DecodePoolSection()


class BatchSection(Section):
    """`batch`: how long a prefill step may wait to fill up; 0 never waits."""

    max_wait_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0


class HttpSection(Section):
    """`http`: the address clients use and how answers are streamed."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000  # 0: any free port
    replicas: Positive = 1
    keepalive_s: PositiveSeconds = 15.0  # between comments on a silent stream
    early_headers_s: PositiveSeconds = 15.0  # headers leave by then even without a token
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    unknown_fields: Literal["refuse", "ignore"] = "refuse"


class RedisSection(Section):
    """`redis`: the shared prefix index."""

    url: str | None = None
    max_blocks: Positive = 1_000_000


class LinkSection(Section):
    """`link`: sessions and data planes between workers."""

    heartbeat_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    frame_bytes: Annotated[int, Field(ge=65_536, le=8 << 20)] = 4 << 20
    checksum: bool = False  # a sum over each frame; TCP and frame headers check already

    @property
    def dead_after_s(self) -> float:
        """Silence after which a peer counts as dead, seconds."""
        return 4.0 * self.heartbeat_s


class RoutingSection(Section):
    """`routing`: how a pair of workers is chosen."""

    policy: str = "least_loaded"
    local_prefill_max_tokens: NonNegative = 0  # shorter uncached prompts are prefilled on decode
    decision_log: str | None = None


class SloSection(Section):
    """`admission.slo`: promises used for early rejection."""

    ttft_s: PositiveSeconds | None = None
    tpot_s: PositiveSeconds | None = None


class AdmissionSection(Section):
    """`admission`: how much may wait at the ingress, and for how long."""

    max_queue: NonNegative = 1024  # requests
    queue_timeout_s: PositiveSeconds = 60.0
    slo: SloSection = SloSection()


class TenantSection(Section):
    """`tenants.<name>`: keys, share and budget of one tenant."""

    keys_file: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    priority: Literal["priority", "default", "flex"] = "default"
    tokens_per_min: Positive | None = None


class TelemetrySection(Section):
    """`telemetry`: traces and what they may contain."""

    sample_ratio: Ratio = 1.0
    receiver: bool = False
    log_content: bool = False


class DebugSection(Section):
    """`debug`: routes and switches for people who look inside."""

    enabled: bool | None = None  # None: when `http.host` is a loopback address
    faults: bool = False
