"""Start and end of a cluster as a user meets them: signals, mistakes, detach."""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.cluster_process import (
    DIPTYCH,
    GONE_S,
    environment,
    run_cli,
    running_cluster,
    starting_cluster,
)

if TYPE_CHECKING:
    from pathlib import Path

PHASES = ["import Ray", "start Ray", "start Serve"]


def test_interrupt_leaves_no_process_and_exits_with_0():
    with running_cluster() as cluster:
        code, _ = cluster.interrupt()
    assert code == 0


def test_repeated_interrupt_is_harmless():
    with running_cluster() as cluster:
        code, _ = cluster.interrupt(times=3)
    assert code == 0
    assert "Traceback" not in "".join(cluster.lines)


@pytest.mark.parametrize("phase", PHASES)
def test_interrupt_during_the_start_leaves_no_process(phase: str):
    with starting_cluster() as cluster:
        cluster.read_until(phase)
        code, _ = cluster.interrupt()
    assert code == 0
    assert "Traceback" not in "".join(cluster.lines)


def test_interrupt_works_from_a_background_job_of_a_shell():
    # a non-interactive shell starts its background jobs with SIGINT ignored
    script = f'"{DIPTYCH}" up --local --set http.port=0 --set cluster.name=test-background & wait'
    shell = subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert shell.stdout is not None
    with shell, shell.stdout:
        ready = any(line.startswith("ready: ") for line in shell.stdout)
        assert ready
        job = subprocess.check_output(["pgrep", "-P", str(shell.pid)], text=True).split()
        subprocess.run(["kill", "-INT", *job], check=True)
        assert shell.wait(25) == 0


def test_detach_and_down():
    up = run_cli("up", "--detach", "--set", "http.port=0", "--set", "cluster.name=test-detached",
                 timeout_s=200)  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    url = up.stdout.split("ready: ")[1].split()[0]
    assert run_cli("status", "--url", url).returncode == 0
    again = run_cli("up", "--set", "cluster.name=test-detached")
    assert again.returncode == 1
    assert "already runs" in again.stderr
    down = run_cli("down", "--url", url)
    assert (down.returncode, down.stdout) == (0, "test-detached: stopped\n")
    assert run_cli("status", "--url", url).returncode == 1


def refused(*args: str) -> str:
    """The one sentence of a start that must fail before anything runs."""
    done = run_cli("up", *args)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"http.port: {port} is taken" in refused("--set", f"http.port={port}")


def test_missing_model_is_named():
    assert "model.id" in refused("--set", "model.id=./no-such-folder", "--set", "http.port=0")


def test_too_little_memory_names_the_key():
    message = refused("--set", "pools.decode.kv_blocks=100000000", "--set", "http.port=0")
    assert "pools.decode.kv_blocks" in message
    assert "GiB is available" in message


def test_mistake_in_the_config_names_the_key(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("pools: {prefill: {replicas: many}}\n")
    assert "pools.prefill.replicas: got 'many'" in refused(str(file))


def test_termination_is_a_clean_stop():
    with running_cluster("--local") as cluster:
        code, _ = cluster.interrupt(number=signal.SIGTERM)
    assert code == 0


def test_death_of_rays_daemon_ends_the_cluster_with_a_reason():
    with running_cluster() as cluster:
        processes = cluster.descendants()
        next(process for process in processes if process.name() == "raylet").kill()
        cluster.lines.extend(cluster.process.stdout or ())
        assert cluster.process.wait(30) == 1
        _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive
    assert "raylet ended" in "".join(cluster.lines)
