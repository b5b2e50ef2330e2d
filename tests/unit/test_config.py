"""The config file: defaults, overrides, messages, and refusal of settings without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from cluster.config import Config, config_schema, load_config, read_environment
from cluster.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(overrides))
    return caught.value.message


def test_builtin_default_equals_the_laptop_file():
    assert load_config(CONFIGS / "laptop.yaml") == load_config() == Config()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path):
    assert load_config(path).num_workers >= 2


def test_override_is_a_yaml_scalar():
    config = load_config(
        None,
        ["http.port=0", "prefix_cache=false", "model.revision=null", "model.served_name=a=b"],
    )
    assert config.http.port == 0
    assert config.prefix_cache is False
    assert config.model.revision is None
    assert config.served_name == "a=b"


def test_override_wins_over_the_file(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("http: {port: 9000}\npools:\n")
    config = load_config(file, ["http.port=9001", "pools.decode.replicas=3"])
    assert config.http.port == 9001
    assert config.pools.decode.replicas == 3


def test_unknown_key_names_path_and_alternatives():
    message = refusal("pools.prefil.replicas=2")
    assert "pools.prefil" in message
    assert "did you mean prefill" in message
    assert "accepted here: decode, prefill" in message


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("http.port=eighty", "http.port", "'eighty'"),
        ("http.port=70000", "http.port", "70000"),
        ("mode=both", "mode", "'both'"),
        ("pools.decode.replicas=0", "pools.decode.replicas", "0"),
        ("model.max_len=1.5", "model.max_len", "1.5"),
        ("prefix_cache=1", "prefix_cache", "1"),
        ("request_timeout_s=.nan", "request_timeout_s", "nan"),
        ("link.frame_bytes=1", "link.frame_bytes", "1"),
    ],
)
def test_wrong_value_names_path_value_and_expectation(override: str, path: str, value: str):
    message = refusal(override)
    assert f"{path}: got {value}, " in message
    assert "expected" in message


def test_all_mistakes_are_reported_at_once():
    message = refusal("mode=both", "http.port=-1")
    assert "mode" in message
    assert "http.port" in message


@pytest.mark.parametrize(
    "override",
    [
        "pools.prefill.tp=2",
        "redis.url=redis://localhost",
        "transport=nccl",
        "tenants.acme.weight=2.0",
        "admission.slo.ttft_s=1",
        "debug.faults=true",
    ],
)
def test_setting_without_effect_is_refused(override: str):
    message = refusal(override)
    assert message.startswith(override.split("=")[0].split(".acme")[0])
    assert "accepted" in message


@pytest.mark.parametrize("override", ["http.port", "=1", "http..port=1", "block_size.x.y=1"])
def test_malformed_override_is_refused(override: str):
    assert refusal(override)


def test_override_through_a_scalar_is_refused(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("http: 5\n")
    with pytest.raises(ConfigError, match="http is not a section"):
        load_config(file, ["http.port=1"])


@pytest.mark.parametrize("text", ["- a\n", "just text", "a: [", "a: b: c"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(file)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.config.available_cores", lambda: 8)
    assert load_config().prefill_threads == 4
    assert load_config(None, ["mode=aggregated"]).decode_threads == 8
    assert load_config(None, ["pools.decode.replicas=64"]).decode_threads == 1
    assert load_config(None, ["pools.decode.threads=3"]).decode_threads == 3


def test_aggregated_mode_starts_no_prefill_worker():
    config = load_config(None, ["mode=aggregated"])
    assert not config.is_disaggregated
    assert (config.prefill_replicas, config.decode_replicas, config.num_workers) == (0, 1, 1)


@pytest.mark.parametrize(
    ("host", "shown", "debug"),
    [("0.0.0.0", "127.0.0.1", False), ("127.0.0.1", "127.0.0.1", True), ("::1", "[::1]", True)],
)
def test_url_and_debug_follow_the_host(host: str, shown: str, debug: bool):
    config = load_config(None, [f"http.host='{host}'"])
    assert config.url == f"http://{shown}:8000"
    assert config.debug_enabled is debug


def test_config_is_immutable_at_every_level():
    def frozen(section: BaseModel) -> None:
        assert section.model_config["frozen"]
        for value in dict(section).values():
            if isinstance(value, BaseModel):
                frozen(value)

    frozen(Config())


def test_schema_accepts_the_shipped_keys():
    properties = config_schema()["properties"]
    for path in CONFIGS.glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= set(properties)


def test_environment_has_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("DIPTYCH_CACHE", raising=False)
    monkeypatch.setenv("DIPTYCH_SECRET", "")
    assert read_environment().cache_dir == Path.home() / ".cache" / "diptych"
    assert read_environment().secret is None
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_SECRET", "s")
    assert read_environment().cache_dir == tmp_path
    assert read_environment().secret == b"s"
