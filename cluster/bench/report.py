"""What a run shows and keeps: progress lines, tables, and one JSON file.

Owns the terminal and `out/<target>.json`: samples as they were measured, with versions, machine
and configs, so that a table can be made again and two runs compared.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster.clock import monotonic_s, wall_s
from cluster.config import available_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT = Path("out")
BUSY_LOAD = 1.0  # a load average above this spoils figures
_PACKAGES = ("diptych", "torch", "transformers", "ray", "grpcio", "uvicorn", "fastapi", "msgspec")


class Report:
    """Collects sections; prints as it goes."""

    def __init__(self, target: str) -> None:
        """Start the clock and describe the machine."""
        self._target = target
        self._started_s = monotonic_s()
        self._sections: dict[str, Any] = {}
        self._tables: list[str] = []
        self._machine = machine()
        self._started_wall_s = wall_s()

    def say(self, text: str = "") -> None:
        """Print a line."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def head(self) -> None:
        """Print what runs where, and whether the machine is quiet enough."""
        facts = self._machine
        self.say(f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']:.0f} GiB")
        self.say(", ".join(f"{name} {number}" for name, number in versions().items()))
        if facts["load_1min"] > BUSY_LOAD:
            self.say(f"load average {facts['load_1min']:.1f}: other work will disturb the figures")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print the phase's seconds when it is over."""
        since_s = monotonic_s()
        yield
        now_s = monotonic_s()
        self.say(f"{now_s - self._started_s:6.0f} s  {name}: {now_s - since_s:.1f} s")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table and keep it for the end."""
        self._tables.append(format_table(title, header, rows))
        self.say(f"\n{self._tables[-1]}\n")

    def keep(self, section: str, data: dict[str, Any]) -> None:
        """Keep a section's figures for the file."""
        self._sections[section] = data

    def finish(self) -> None:
        """Print all tables again, together, and write the file."""
        self.say("\n" + "\n\n".join(self._tables))
        OUT.mkdir(exist_ok=True)
        path = OUT / f"{self._target}.json"
        whole = {
            "target": self._target,
            "started_wall_s": self._started_wall_s,
            "took_s": monotonic_s() - self._started_s,
            "versions": versions(),
            "machine": self._machine,
            "sections": self._sections,
        }
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        self.say(f"\n{whole['took_s']:.0f} s in all; figures in {path}")


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left and the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, rule, padded(header), *(padded(row) for row in rows)])


def versions() -> dict[str, str]:
    """Python and the packages whose speed is measured."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    return {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": psutil.virtual_memory().total / (1 << 30),
        "kernel": platform.release(),
        "load_1min": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
