"""The least a streaming server can cost: one uvicorn process, raw ASGI, tokens made in place.

Run as `python -m cluster.bench.rivals.uvicorn_app --tokens-per-s N`; prints `ready: URL`.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from cluster.bench.rivals.pacing import DONE, ticks, token_chunk

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BACKLOG = 2048


class StreamingApp:
    """Answers every POST with a stream of tokens."""

    def __init__(self, tokens_per_s: float) -> None:
        """`tokens_per_s` of each stream."""
        self._tokens_per_s = tokens_per_s
        self._chunk = token_chunk()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for _ in ticks(json.loads(body)["max_tokens"], self._tokens_per_s):
            await send({"type": "http.response.body", "body": self._chunk, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def main() -> None:
    """Serve on a free port until SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens-per-s", type=float, required=True)
    app = StreamingApp(parser.parse_args().tokens_per_s)
    taken = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=0,  # streams whose client has gone would hold it up
    )
    sys.stdout.write(f"ready: http://127.0.0.1:{taken.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[taken])


if __name__ == "__main__":
    main()
