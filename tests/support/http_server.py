"""Runs an ASGI application on a real socket inside the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn


@asynccontextmanager
async def serve(app):
    """Yield the base URL of `app` on a free port of the loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    started = asyncio.Event()
    startup = server.startup

    async def announce(sockets=None):
        await startup(sockets)
        started.set()

    server.startup = announce
    server.capture_signals = _no_signals
    task = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait_for(started.wait(), 10)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        listener.close()


class _no_signals:  # noqa: N801 - stands in for a context manager function
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None
