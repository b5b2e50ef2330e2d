"""Figures of the benches: percentiles, prompts, /proc arithmetic, setups, tables."""

from __future__ import annotations

import json
import os

import pytest

from cluster.bench.client import Trace
from cluster.bench.procs import ProcessTime, difference, label, parse_stat, read_stack
from cluster.bench.report import Report, format_table
from cluster.bench.stacks import aggregated, split, timed
from cluster.bench.stats import pair_ratio, percentile, spread
from cluster.bench.throughput import Samples
from cluster.bench.workload import BURSTS, FIRST_ID, LAST_ID


def test_percentiles_interpolate():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3], 100) == 3
    assert percentile([7], 99) == 7
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_spreads_name_median_and_range():
    assert spread([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0-3.0)"
    assert spread([2.0]).text(0) == "2"


def test_pairs_are_compared_with_their_neighbour():
    # a machine that becomes twice as slow halfway changes no ratio
    assert pair_ratio([1.1, 2.2], [1.0, 2.0]).median == pytest.approx(1.1)


@pytest.mark.parametrize("burst", BURSTS, ids=lambda burst: burst.name)
def test_prompts_are_the_same_for_all_setups_and_new_in_every_repetition(burst):
    first, again, other = burst.prompts("0"), burst.prompts("0"), burst.prompts("1")
    assert first == again
    assert len(first) == burst.num_requests
    lengths = {len(prompt) for prompt in first}
    assert lengths == {burst.prefix_tokens + burst.prompt_tokens}
    assert all(FIRST_ID <= token < LAST_ID for prompt in first for token in prompt)
    assert first[0][:16] != other[0][:16]


def test_a_shared_prefix_is_shared_and_nothing_else_is():
    burst = BURSTS[2]
    prompts = burst.prompts("0")
    assert len({tuple(prompt[: burst.prefix_tokens]) for prompt in prompts}) == 1
    assert len({tuple(prompt[burst.prefix_tokens :]) for prompt in prompts}) == burst.num_requests


def test_samples_of_a_burst_span_from_first_request_to_last_token():
    samples = Samples()
    samples.add([Trace(0.0, [1.0, 2.0, 3.0], 3), Trace(0.5, [1.5, 4.5], 2)])
    assert samples.tokens_per_s == [pytest.approx(5 / 4.5)]
    assert samples.ttft_s == [1.0, 1.0]
    assert samples.tpot_s == [1.0, 3.0]


def test_a_static_batch_gives_all_its_rows_their_tokens_together():
    samples = Samples()
    samples.add_batch(2, [0.5, 1.0, 1.5])
    assert samples.tokens_per_s == [pytest.approx(4.0)]
    assert samples.ttft_s == [0.5, 0.5]
    assert samples.tpot_s == [0.5, 0.5]


def test_processor_time_is_read_past_any_process_name():
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    stat = f"12 (a) b)) S 1 12 77 0 -1 4 0 0 0 0 {ticks_per_s} {2 * ticks_per_s} 9 9 20 0"
    assert parse_stat(stat) == (77, 3.0)


def test_this_process_is_in_its_session():
    assert os.getpid() in read_stack(os.getsid(0))


def test_use_is_the_difference_of_two_readings_by_name():
    before = {1: ProcessTime("a", 1.0), 2: ProcessTime("b", 5.0), 3: ProcessTime("gone", 9.0)}
    after = {1: ProcessTime("a", 1.5), 2: ProcessTime("b", 7.0), 4: ProcessTime("a", 0.25)}
    use = difference(before, after)
    assert use.total_s == pytest.approx(2.75)
    assert list(use.by_label_s.items()) == [("b", 2.0), ("a", 0.75)]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (b"ray::ServeReplica:diptych:decode", "replica decode"),
        (b"/x/gcs_server\0--log_dir=/tmp", "gcs"),
        (b"python\0-m\0router.cli\0up", "diptych up"),
        (b"/usr/bin/something\0-x", "something"),
        (b"", "unnamed"),
    ],
)
def test_processes_have_short_names(command: bytes, name: str):
    assert label(command) == name


def test_all_setups_are_valid_configs_with_the_threads_they_promise():
    assert (split(2).config.prefill_threads, split(2).config.decode_threads) == (1, 1)
    assert aggregated(2, 1).config.decode_replicas == 2
    assert aggregated(1, 2).config.decode_threads == 2
    config = timed(256, 4.0, 100).config
    assert config.engine == "timed"
    assert config.pools.decode.kv_blocks >= 256 * 7
    assert config.timed.decode_a_s == 0.25


def test_tables_line_up():
    text = format_table("t", ("name", "x"), [["a", "1.5"], ["long name", "10"]])
    assert text.splitlines()[2:] == ["name         x", "a          1.5", "long name   10"]


def test_the_file_holds_versions_machine_and_sections(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = Report("bench")
    report.head()
    report.table("title", ("a", "b"), [["1", "2"]])
    report.keep("idle", {"cores": 0.1})
    report.finish()
    kept = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert kept["sections"]["idle"]["cores"] == 0.1
    assert kept["versions"]["diptych"]
    assert kept["machine"]["cores"] >= 1
    assert "title" in capsys.readouterr().out
