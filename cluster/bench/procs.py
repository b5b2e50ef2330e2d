"""Processor time and memory of a process and everything it started, from /proc.

A stack is all processes of one session (the POSIX kind: `setsid`), so daemons whose parent has
gone are still counted. Linux only. Processes that end between two readings are missed; stacks
that serve start none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SESSION, _UTIME, _STIME = 3, 11, 12  # fields of /proc/PID/stat after the name


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """One process at one moment."""

    label: str
    cpu_s: float  # user and system, since it started


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What a stack used between two readings."""

    total_s: float
    by_label_s: dict[str, float]  # largest first


def read_stack(session: int) -> dict[int, ProcessTime]:
    """Every process of a session, by process id."""
    found = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8")
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        fields = parse_stat(stat)
        if fields[0] == session:
            found[int(folder.name)] = ProcessTime(label(command), fields[1])
    return found


def parse_stat(stat: str) -> tuple[int, float]:
    """Return (session, processor seconds) of a /proc/PID/stat line; its name may hold anything."""
    fields = stat[stat.rindex(")") + 1 :].split()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return int(fields[_SESSION]), ticks / _TICKS_PER_S


def difference(before: dict[int, ProcessTime], after: dict[int, ProcessTime]) -> CpuUse:
    """Processor time between two readings of the same stack."""
    used: dict[str, float] = {}
    for pid, process in after.items():
        since_s = before[pid].cpu_s if pid in before else 0.0
        used[process.label] = used.get(process.label, 0.0) + process.cpu_s - since_s
    ordered = dict(sorted(used.items(), key=lambda item: -item[1]))
    return CpuUse(sum(used.values()), ordered)


_KNOWN = (
    (r"ray::ServeReplica:[^:]*:([\w-]+)", r"replica \1"),
    (r"ray::ServeController", "Serve controller"),
    (r"ray::ProxyActor", "Serve proxy"),
    (r"ray::IDLE", "idle Ray worker"),
    (r"gcs_server", "gcs"),
    (r"raylet/raylet|^raylet", "raylet"),
    (r"dashboard/agent\.py|DashboardAgent", "dashboard agent"),
    (r"runtime_env/agent|RuntimeEnvAgent", "runtime env agent"),
    (r"log_monitor\.py", "log monitor"),
    (r"monitor\.py", "monitor"),
    (r"router\.cli|diptych", "diptych up"),
    (r"uvicorn_app", "uvicorn"),
    (r"serve_app", "driver"),
)


def label(command: bytes) -> str:
    """A short name for a command line, with process-specific parts left out."""
    line = command.replace(b"\0", b" ").decode(errors="replace").strip()
    for pattern, name in _KNOWN:
        match = re.search(pattern, line)
        if match:
            return match.expand(name)
    return line.split(" ", 1)[0].rpartition("/")[2] or "unnamed"
