"""Membership, targeted calls and replacement on a real Ray Serve, with workers without engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
Listed = dict[str, tuple[str, int]]  # worker id -> (incarnation, pid)


class Ingress:
    """The stub ingress, called through the process that started the cluster."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if not line.startswith("\x1b"):  # Ray's daemons print to the same stream, in colour
                return json.loads(line)
        raise AssertionError("the cluster ended")

    def hold(self, worker: str, target: str) -> str:
        answer: str = self.call("hold", worker.split("-")[0], target)
        return answer

    def listed(self, replaced: str = "", old: str | None = None) -> Listed:
        """Wait until all three workers are listed, `replaced` under another incarnation."""
        expected = dict.fromkeys(("prefill-0", "prefill-1", "decode-0"))
        expected |= {replaced: old} if replaced else {}
        found = self.call("wait_for", expected)
        return {worker: (incarnation, pid) for worker, incarnation, pid in found}


@pytest.fixture(scope="module")
def drain_marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a stub worker writes when it is told to drain."""
    return tmp_path_factory.mktemp("drain") / "marker"


@pytest.fixture(scope="module")
def ingress(drain_marker: Path) -> Iterator[Ingress]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.stub_pool"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"STUB_DRAIN_MARKER": str(drain_marker)},
    )
    with process:
        yield Ingress(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        process.stdout.read()
        assert process.wait(30) == 0


def test_directory_lists_every_worker_with_its_address(ingress: Ingress):
    workers = ingress.listed()
    assert len({incarnation for incarnation, _ in workers.values()}) == 3
    assert len({pid for _, pid in workers.values()}) == 3


def test_call_reaches_the_named_worker_or_nobody(ingress: Ingress):
    for worker, (incarnation, _) in ingress.listed().items():
        assert [ingress.hold(worker, incarnation) for _ in range(3)] == [incarnation] * 3
    assert ingress.hold("prefill-0", "no-such-incarnation") == "WorkerLostError"


@pytest.mark.parametrize("worker", ["decode-0", "prefill-1"])
def test_killed_worker_is_replaced_under_its_id(ingress: Ingress, worker: str):
    old = ingress.listed()
    incarnation, pid = old.pop(worker)
    os.kill(pid, signal.SIGKILL)
    new = ingress.listed(worker, incarnation)
    assert new.pop(worker)[1] != pid
    assert new == old
    assert ingress.hold(worker, incarnation) == "WorkerLostError"


def test_unhealthy_worker_is_replaced(ingress: Ingress):
    incarnation, pid = ingress.listed()["decode-0"]
    ingress.call("fail", "decode", incarnation)
    assert ingress.listed("decode-0", incarnation)["decode-0"][1] != pid


def test_terminated_worker_drains_before_it_is_replaced(ingress: Ingress, drain_marker: Path):
    incarnation, pid = ingress.listed()["decode-0"]
    assert not drain_marker.exists()
    os.kill(pid, signal.SIGTERM)
    assert ingress.listed("decode-0", incarnation)["decode-0"][1] != pid
    assert drain_marker.read_text() == "decode-0 2.0"
