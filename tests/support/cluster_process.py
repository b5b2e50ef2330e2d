"""A cluster started the way a user does: `diptych up` in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

DIPTYCH = Path(sys.executable).with_name("diptych")
GONE_S = 25.0  # the goal is 5


def environment(**extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | extra


def run_cli(*args: str, timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [str(DIPTYCH), *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**env),
    )


class ClusterProcess:
    """One `diptych up`; `lines` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.process = process
        self.name = name
        self.lines: list[str] = []
        self.url = ""

    def read_until(self, text: str) -> str:
        """Read output until a line with `text`; fails if the command ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended before {text!r}:\n{''.join(self.lines)}")

    def wait_ready(self) -> None:
        self.url = self.read_until("ready: ").split()[1]

    def status(self) -> dict[str, Any]:
        done = run_cli("status", "--json", "--url", self.url)
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self, *, times: int = 1, number: int = signal.SIGINT) -> tuple[int, float]:
        """Send the signal; returns exit code and seconds until every process was gone."""
        processes = self.descendants()
        started_s = time.monotonic()
        for _ in range(times):
            self.process.send_signal(number)
        self.lines.extend(self.process.stdout or ())
        code = self.process.wait(GONE_S)
        _, alive = psutil.wait_procs(processes, timeout=GONE_S)
        took_s = time.monotonic() - started_s
        assert not alive, [process.cmdline() for process in alive]
        return code, took_s

    def kill_everything(self) -> None:
        """For the end of a failed test."""
        if self.process.poll() is None:
            processes = self.descendants()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(GONE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
            _, alive = psutil.wait_procs(processes, timeout=GONE_S)
            for process in alive:
                process.kill()
        self.process.wait(GONE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def starting_cluster(*args: str, **settings: object) -> Iterator[ClusterProcess]:
    """`diptych up` with its own name and a free port; not waited for."""
    name = f"test-{secrets.token_hex(4)}"
    settings = {"cluster__name": name, "http__port": 0} | settings
    command = [str(DIPTYCH), "up", *args]
    for key, value in settings.items():
        command += ["--set", f"{key.replace('__', '.')}={json.dumps(value)}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    cluster = ClusterProcess(process, name)
    try:
        yield cluster
    finally:
        cluster.kill_everything()


@contextmanager
def running_cluster(*args: str, **settings: object) -> Iterator[ClusterProcess]:
    """The same, ready to serve."""
    with starting_cluster(*args, **settings) as cluster:
        cluster.wait_ready()
        yield cluster
