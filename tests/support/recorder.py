"""A session handler that writes down what it is told and lets a test wait for it."""

from __future__ import annotations

import asyncio


class Recorder:
    """Records every callback; `answer` may map a received body to a reply."""

    def __init__(self, answer=None):
        self.events = []
        self.sessions = []
        self._answer = answer
        self._changed = asyncio.Event()

    def opened(self, session):
        self.sessions.append(session)
        self._note(("opened", session.peer.peer))

    def received(self, session, body, call):
        self._note(("received", body))
        if self._answer is not None:
            self._answer(session, body, call)

    def closed(self, session, reason):
        self._note(("closed", reason))

    def of(self, kind):
        return [value for name, value in self.events if name == kind]

    async def until(self, condition, timeout_s=10.0):
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _note(self, event):
        self.events.append(event)
        self._changed.set()
