"""What the command line prints, and where to.

The only module that prints. `up` moves the process' own stdout and stderr into a log file, because
Ray's daemons inherit them and write into them at will; the console keeps the terminal for us.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TextIO

MIN_PHASE_S = 0.05  # shorter phases are not worth a line


class Console:
    """Two text streams and the phases of a start."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Print to the process' streams unless told otherwise."""
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._phase: str | None = None
        self._since_s = 0.0

    def say(self, text: str = "", *, end: str = "\n") -> None:
        """Print to the user; a reader that has gone away is no error."""
        with contextlib.suppress(BrokenPipeError):
            print(text, end=end, file=self._out, flush=True)

    def complain(self, text: str) -> None:
        """Print a sentence about what went wrong."""
        self.end_phase(failed=True)
        with contextlib.suppress(BrokenPipeError):
            print(f"diptych: {text}", file=self._err, flush=True)

    def begin(self, phase: str) -> None:
        """Start a phase, unless it runs already; the one before is printed with its seconds."""
        if phase == self._phase:
            return
        self.end_phase()
        self._phase, self._since_s = phase, monotonic_s()

    def end_phase(self, *, failed: bool = False) -> None:
        """Print the running phase, if any: one line with its seconds."""
        if self._phase is not None:
            seconds = monotonic_s() - self._since_s
            if failed or seconds >= MIN_PHASE_S:
                self.say(f"{seconds:6.1f} s  {self._phase}{'  FAILED' if failed else ''}")
            self._phase = None

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print columns, left-aligned, as wide as their content."""
        lines = [list(header), *(list(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.say("  ".join(cells).rstrip())


def detach_output(log_path: Path) -> Console:
    """Send the process' stdout and stderr, and those of its children, to a fresh file.

    Returns:
        A console on the streams as they were before.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    err = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    return Console(out, err)
