"""A streaming app on Ray Serve as its manual shows it: ingress, handle, worker, all defaults.

The proxy takes the request, an ingress replica answers with a StreamingResponse, and tokens come
from a worker replica through `handle.options(stream=True)`. Only limits that would refuse the load
are raised. Run as `python -m cluster.bench.rivals.serve_app --tokens-per-s N`; prints `ready: URL`.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from starlette.responses import StreamingResponse

from cluster.bench.rivals.pacing import DONE, ticks, token_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

MAX_ONGOING = 1024  # the default of 5 would refuse the load
OBJECT_STORE_BYTES = 80 << 20  # as the product's; nothing travels through it


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class Worker:
    """Makes tokens at a steady rate."""

    def __init__(self, tokens_per_s: float) -> None:
        """`tokens_per_s` of each stream."""
        self._tokens_per_s = tokens_per_s
        self._chunk = token_chunk()

    async def generate(self, num_tokens: int) -> AsyncIterator[bytes]:
        """One answer."""
        async for _ in ticks(num_tokens, self._tokens_per_s):
            yield self._chunk


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class Ingress:
    """Answers with server-sent events."""

    def __init__(self, worker: Any) -> None:  # noqa: ANN401  # a DeploymentHandle
        """Tokens come from `worker`."""
        self._worker = worker.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        """One request."""
        body = await request.json()
        tokens = self._worker.generate.remote(body["max_tokens"])
        return StreamingResponse(_events(tokens), media_type="text/event-stream")


async def _events(tokens: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in tokens:
        yield chunk
    yield DONE


def main() -> None:
    """Serve on a free port until SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens-per-s", type=float, required=True)
    tokens_per_s = parser.parse_args().tokens_per_s
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=4,  # Serve's own processes and ours count one each
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=OBJECT_STORE_BYTES,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Ingress.bind(Worker.bind(tokens_per_s)), name="rival", route_prefix="/")  # type: ignore[attr-defined]
    sys.stdout.write(f"ready: http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
