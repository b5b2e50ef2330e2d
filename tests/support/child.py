"""A child process that answers one JSON line per JSON line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys


class Child:
    """Starts `python -m module args`; `hello` is its first line. Killed when left."""

    def __init__(self, module, *args):
        self._command = [sys.executable, "-m", module, *args]
        self._lock = asyncio.Lock()

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.hello = json.loads(await self.process.stdout.readline())
        return self

    async def __aexit__(self, *_exc):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        await self.process.wait()
        self.process._transport.close()

    async def ask(self, do, **arguments):
        async with self._lock:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            return json.loads(await self.process.stdout.readline())

    async def facts_when(self, condition, timeout_s=10.0):
        """Ask for facts until they fit; each question waits for its answer."""
        async with asyncio.timeout(timeout_s):
            while not condition(facts := await self.ask("facts")):
                pass
            return facts

    def kill(self):
        self.process.kill()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)
