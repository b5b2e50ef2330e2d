"""Every setting of a cluster, checked once at the outer edge.

Owns the YAML keys, their defaults, the numbers derived from them and the two environment
variables. A `Config` is frozen; inner code receives plain values out of it. A bad file fails
with a `ConfigError` that names the key's path, the value found and what would be accepted; a key
whose feature does not exist yet is refused rather than ignored. Never opens a socket or a model.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from cluster.config_sections import (
    AdmissionSection,
    BatchSection,
    ClusterSection,
    DebugSection,
    HttpSection,
    LinkSection,
    Mode,
    ModelSection,
    PoolsSection,
    PositiveSeconds,
    RedisSection,
    RoutingSection,
    Section,
    TelemetrySection,
    TenantSection,
    TimedSection,
)
from cluster.errors import ConfigError


class Config(Section):
    """The whole file. Sections are nested models; numbers derived from them are properties."""

    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    mode: Mode = "disaggregated"
    engine: Literal["torch", "timed"] = "torch"
    timed: TimedSection = TimedSection()
    pools: PoolsSection = PoolsSection()
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16  # tokens
    prefix_cache: bool = True
    batch: BatchSection = BatchSection()
    http: HttpSection = HttpSection()
    request_timeout_s: PositiveSeconds = 600.0
    shutdown_grace_s: Annotated[float, Field(ge=0, le=3600)] = 1.5
    redis: RedisSection = RedisSection()
    transport: Literal["auto", "local", "gloo", "nccl"] = "auto"
    link: LinkSection = LinkSection()
    routing: RoutingSection = RoutingSection()
    admission: AdmissionSection = AdmissionSection()
    tenants: dict[str, TenantSection] = Field(default_factory=dict)
    telemetry: TelemetrySection = TelemetrySection()
    debug: DebugSection = DebugSection()

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by a pool of their own."""
        return self.mode == "disaggregated"

    @property
    def debug_enabled(self) -> bool:
        """Whether `/debug/*` is served; by default only where no other machine can reach it."""
        is_loopback = self.http.host in ("localhost", "::1") or self.http.host.startswith("127.")
        return is_loopback if self.debug.enabled is None else self.debug.enabled

    @property
    def prefill_replicas(self) -> int:
        """Prefill workers to start; none in aggregated mode."""
        return self.pools.prefill.replicas if self.is_disaggregated else 0

    @property
    def decode_replicas(self) -> int:
        """Decode workers to start."""
        return self.pools.decode.replicas

    @property
    def num_workers(self) -> int:
        """Workers of both pools."""
        return self.prefill_replicas + self.decode_replicas

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model.served_name or Path(self.model.id).name

    @property
    def prefill_threads(self) -> int:
        """Compute threads of one prefill worker."""
        return self.pools.prefill.threads or self._threads_per_worker

    @property
    def decode_threads(self) -> int:
        """Compute threads of one decode worker."""
        return self.pools.decode.threads or self._threads_per_worker

    @property
    def _threads_per_worker(self) -> int:
        return max(1, available_cores() // max(1, self.num_workers))

    @property
    def max_wait_s(self) -> float:
        """`batch.max_wait_ms` in seconds."""
        return self.batch.max_wait_ms / 1000

    @property
    def url(self) -> str:
        """Where clients on this machine reach the cluster."""
        host = "127.0.0.1" if self.http.host in ("0.0.0.0", "::", "") else self.http.host
        return (
            f"http://[{host}]:{self.http.port}"
            if ":" in host
            else f"http://{host}:{self.http.port}"
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """What the product reads from the environment; nothing else is read anywhere."""

    cache_dir: Path
    secret: bytes | None  # shared by all processes of a cluster; None: made up by `up`


def read_environment() -> Environment:
    """Read `DIPTYCH_CACHE` and `DIPTYCH_SECRET`."""
    cache = os.environ.get("DIPTYCH_CACHE") or "~/.cache/diptych"
    secret = os.environ.get("DIPTYCH_SECRET") or None
    return Environment(Path(cache).expanduser(), secret.encode() if secret else None)


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def load_config(path: Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read `path` (None: the built-in defaults), apply `a.b=v` overrides, check everything.

    Raises:
        ConfigError: with the key's path, the value and what would be accepted.
    """
    where = str(path) if path else "defaults"
    data = _read_yaml(path) if path else {}
    for override in overrides or []:
        _apply(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None
    _refuse_unbuilt(config)
    return config


def config_schema() -> dict[str, Any]:
    """JSON schema of the file, for editors and `diptych config schema`."""
    return Config.model_json_schema()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {_show(data)} at the top, expected a mapping of sections")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is a YAML scalar (`0`, `true`, `null`, `[a]`, text)."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected KEY=VALUE, for example http.port=8001")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {path}: {text!r} is not a YAML value") from None
    for depth, key in enumerate(keys[:-1]):
        child = data.setdefault(key, {})
        if child is None:
            child = data[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {path}: {'.'.join(keys[: depth + 1])} is not a section")
        data = child
    data[keys[-1]] = value


def _explain(error: ValidationError, where: str) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(top)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key; {_accepted_keys(item['loc'])}")
            continue
        expected = item["msg"].replace("Input should be", "expected", 1)
        lines.append(f"{path}: got {_show(item['input'])}, {expected[:1].lower()}{expected[1:]}")
    return f"{where}: " + "; ".join(dict.fromkeys(lines))


def _accepted_keys(loc: tuple[int | str, ...]) -> str:
    """The keys of the section that holds an unknown one, the closest first if one is close."""
    section: type[BaseModel] = Config
    for part in loc[:-1]:
        field = section.model_fields.get(str(part))
        kind = field.annotation if field else None
        section = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else TenantSection
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}accepted here: {', '.join(names)}"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_unbuilt(config: Config) -> None:
    """A setting that would have no effect yet is an error, never a silent default."""
    default = Config()
    rules: list[tuple[str, object, object]] = [
        ("pools.prefill.tp", config.pools.prefill.tp, 1),
        ("pools.decode.tp", config.pools.decode.tp, 1),
        ("redis.url", config.redis.url, None),
        ("redis.max_blocks", config.redis.max_blocks, default.redis.max_blocks),
        ("routing.policy", config.routing.policy, default.routing.policy),
        ("routing.decision_log", config.routing.decision_log, None),
        ("admission.slo.ttft_s", config.admission.slo.ttft_s, None),
        ("admission.slo.tpot_s", config.admission.slo.tpot_s, None),
        ("tenants", dict.fromkeys(config.tenants, "..."), {}),
        ("telemetry.sample_ratio", config.telemetry.sample_ratio, 1.0),
        ("telemetry.receiver", config.telemetry.receiver, False),
        ("telemetry.log_content", config.telemetry.log_content, False),
        ("debug.faults", config.debug.faults, False),
    ]
    for path, value, accepted in rules:
        if value != accepted:
            raise ConfigError(
                f"{path}: got {_show(value)}, but this version has no such feature; "
                f"accepted: {_show(accepted)}"
            )
    if config.transport not in ("auto", "gloo"):
        raise ConfigError(
            f"transport: got {config.transport!r}, but this version has no such data plane; "
            "accepted: 'auto', 'gloo'"
        )
