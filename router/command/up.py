"""`diptych up`: from a config to a cluster that serves until it is told to stop.

Owns the order of a start, its progress lines, the run note and the clean end. Every failure before
serving leaves no process behind and is one sentence. The cluster itself is `router.app` (Ray) or
`router.local`.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from cluster.clock import monotonic_s
from cluster.config import load_config, read_environment
from cluster.errors import ConfigError, DiptychError
from cluster.model.resolve import resolve_model
from router.command import runfile
from router.command.chat import ask
from router.command.client import ClusterClient
from router.command.console import Console, detach_output
from router.command.preflight import check_memory, claim_port

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from cluster.config import Config, Environment
    from cluster.model.identity import ModelFolder
    from router.command.signals import StopSignals

READY_S = 60.0  # from all replicas up to a token that has passed the whole path
READY_LINE = "ready"
WATCH_S = 1.0
CHILD_STOP_S = 20.0
DEMO_QUESTION = "What is the capital of France?"
DEMO_MAX_TOKENS = 48


class RunningCluster(Protocol):
    """What `up` needs of a cluster, with or without Ray."""

    def start(self, begin: Callable[[str], None]) -> None:
        """Start everything, telling the name of each phase as it begins."""

    def failure(self) -> str | None:
        """Why the cluster cannot go on, if so."""

    def stop(self) -> None:
        """Leave no process behind."""


def up(args: argparse.Namespace, console: Console, signals: StopSignals) -> int:
    """Run the command; returns the exit code."""
    config = load_config(args.config, args.set)
    environment = read_environment()
    _refuse_second(config, environment.cache_dir)
    if args.detach:
        return _detach(args, console)
    if not args.local:
        console = detach_output(runfile.log_path(environment.cache_dir, config.cluster.name))
    signals.install()
    try:
        return _serve(args, config, environment, console, signals)
    except DiptychError as error:
        console.complain(error.message)
        return 2 if isinstance(error, ConfigError) else 1


def _serve(
    args: argparse.Namespace,
    config: Config,
    environment: Environment,
    console: Console,
    signals: StopSignals,
) -> int:
    started_s = monotonic_s()
    cluster: RunningCluster | None = None
    try:
        with signals.interrupting():
            console.begin("check the port and the model")
            config = claim_port(config)
            folder = resolve_model(
                config.model.id,
                config.model.revision,
                environment.cache_dir,
                progress=lambda text, _fraction: console.begin(text),
            )
            check_memory(config, folder)
            cluster = _cluster(args, config, folder, environment)

            def begin(phase: str) -> None:
                signals.install()  # Ray takes SIGTERM for itself
                console.begin(phase)

            _note(config, environment, ready=False)
            cluster.start(begin)
            begin("first token through the whole path")
            client = ClusterClient(config.url)
            _until_ready(client, cluster, signals)
            console.end_phase()
            console.say(f"{monotonic_s() - started_s:6.1f} s  in all")
            if args.demo:
                _demo(client, console)
        _note(config, environment, ready=True)
        console.say(f"{READY_LINE}: {config.url}  (Ctrl-C stops it)")
        return _watch(cluster, console, signals)
    except (KeyboardInterrupt, SystemExit):
        return 0
    except DiptychError:
        console.end_phase(failed=True)
        raise
    finally:
        signals.requested.set()  # from here on a signal changes nothing
        try:
            if cluster is not None:
                console.end_phase()
                console.begin("stop")
                cluster.stop()
                console.end_phase()
        finally:
            runfile.remove(environment.cache_dir, config.cluster.name)


def _cluster(
    args: argparse.Namespace, config: Config, folder: ModelFolder, environment: Environment
) -> RunningCluster:
    secret = environment.secret or secrets.token_bytes(32)
    if args.local:
        from router.local import LocalCluster

        return LocalCluster(config, folder, secret)
    from router.app import RayCluster

    return RayCluster(config, folder, secret)


def _refuse_second(config: Config, cache_dir: Path) -> None:
    note = runfile.find(cache_dir, config.cluster.name)
    if note is not None:
        raise DiptychError(
            f"cluster.name: {note.name!r} already runs as process {note.pid} at {note.url}; "
            "stop it with `diptych down`, or choose another name and port"
        )


def _note(config: Config, environment: Environment, *, ready: bool) -> None:
    note = runfile.note_of_this_process(config.cluster.name, config.url, ready=ready)
    runfile.write(environment.cache_dir, note)


def _until_ready(client: ClusterClient, cluster: RunningCluster, signals: StopSignals) -> None:
    """Ask until a test token has passed the whole path."""
    pause = threading.Event()
    deadline_s = monotonic_s() + READY_S
    while not client.is_ready():
        reason = cluster.failure()
        if reason is not None:
            raise DiptychError(f"the cluster failed while starting: {reason}")
        if monotonic_s() > deadline_s:
            raise DiptychError(f"no token has passed the whole path within {READY_S:.0f} s")
        pause.wait(0.05)


def _demo(client: ClusterClient, console: Console) -> None:
    console.say(f"\n> {DEMO_QUESTION}")
    question = [{"role": "user", "content": DEMO_QUESTION}]
    ask(client, console, client.model(), question, DEMO_MAX_TOKENS)
    console.say()


def _watch(cluster: RunningCluster, console: Console, signals: StopSignals) -> int:
    """Serve until a signal comes or the cluster fails."""
    while not signals.requested.wait(WATCH_S):
        reason = cluster.failure()
        if reason is not None:
            console.complain(f"the cluster failed: {reason}")
            return 1
    return 0


def _detach(args: argparse.Namespace, console: Console) -> int:
    """Start the same command in a session of its own; return once it serves or has failed."""
    command = [sys.executable, "-m", "router.cli", "up"]
    command += [str(args.config)] if args.config else []
    for override in args.set:
        command += ["--set", override]
    command += ["--local"] if args.local else []
    command += ["--demo"] if args.demo else []
    child = subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith(READY_LINE):
                console.say(line.replace("(Ctrl-C stops it)", "(`diptych down` stops it)"), end="")
                return 0
            console.say(line, end="")
        return child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait(CHILD_STOP_S)
        raise
