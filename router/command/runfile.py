"""The note a running cluster leaves for `down`, `status` and the next `up`.

One JSON file per cluster name under the cache folder: process id, its start time (so that a reused
id is not mistaken for it), URL and readiness. Never holds a secret. A note whose process is gone
is ignored and removed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunNote:
    """One running cluster."""

    name: str
    pid: int
    started_wall_s: float  # of the process, as the kernel tells it
    url: str
    ready: bool


def folder(cache_dir: Path) -> Path:
    """Where notes and logs of running clusters lie."""
    return cache_dir / "run"


def log_path(cache_dir: Path, name: str) -> Path:
    """The log of a cluster's main process and of Ray's daemons."""
    return folder(cache_dir) / f"{name}.log"


def note_of_this_process(name: str, url: str, *, ready: bool) -> RunNote:
    """A note about the process that calls."""
    return RunNote(name, os.getpid(), psutil.Process().create_time(), url, ready)


def write(cache_dir: Path, note: RunNote) -> None:
    """Write the note in one step, so that a reader never sees half of it."""
    target = _path(cache_dir, note.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{note.pid}.tmp")
    draft.write_text(json.dumps(asdict(note)), encoding="utf-8")
    draft.replace(target)


def remove(cache_dir: Path, name: str) -> None:
    """Forget a cluster of this process; a note of another process is left alone."""
    note = _load(_path(cache_dir, name))
    if note is not None and note.pid == os.getpid():
        _path(cache_dir, name).unlink(missing_ok=True)


def find(cache_dir: Path, name: str) -> RunNote | None:
    """The note of a cluster that still runs."""
    note = _load(_path(cache_dir, name))
    return note if note is not None and _runs(note) else None


def running(cache_dir: Path) -> list[RunNote]:
    """All clusters that still run, by name."""
    notes = (_load(path) for path in sorted(folder(cache_dir).glob("*.json")))
    return [note for note in notes if note is not None and _runs(note)]


def _path(cache_dir: Path, name: str) -> Path:
    return folder(cache_dir) / f"{name}.json"


def _load(path: Path) -> RunNote | None:
    try:
        return RunNote(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _runs(note: RunNote) -> bool:
    try:
        process = psutil.Process(note.pid)
        same = abs(process.create_time() - note.started_wall_s) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
