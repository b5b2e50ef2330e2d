"""`diptych down`, and which of the clusters on this machine a command means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from cluster.config import read_environment
from cluster.errors import ConfigError, DiptychError
from router.command import runfile

if TYPE_CHECKING:
    from router.command.console import Console
    from router.command.runfile import RunNote

DOWN_S = 20.0


def pick(url: str | None) -> RunNote | None:
    """The running cluster at `url`, or the only one there is.

    Raises:
        ConfigError: several clusters run and none was named.
    """
    notes = runfile.running(read_environment().cache_dir)
    if url is not None:
        return next((note for note in notes if note.url == url.rstrip("/")), None)
    if len(notes) > 1:
        names = ", ".join(f"{note.name} at {note.url}" for note in notes)
        raise ConfigError(f"--url: several clusters run here ({names}); name one")
    return notes[0] if notes else None


def down(url: str | None, console: Console) -> int:
    """Stop the cluster and wait until it is gone; returns the exit code.

    Raises:
        DiptychError: there is none, or it does not stop.
    """
    note = pick(url)
    if note is None:
        raise DiptychError(f"no cluster of this machine runs{f' at {url}' if url else ''}")
    try:
        process = psutil.Process(note.pid)
        process.terminate()
        process.wait(DOWN_S)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        raise DiptychError(f"process {note.pid} belongs to another user") from None
    except psutil.TimeoutExpired:
        raise DiptychError(f"process {note.pid} has not stopped within {DOWN_S:.0f} s") from None
    console.say(f"{note.name}: stopped")
    return 0
