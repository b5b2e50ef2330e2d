"""The HTTP listener of an ingress: uvicorn inside an event loop that already runs.

Owns the port. Streams bytes from the application straight to the socket, without Serve's proxy
or its ASGI wrapper in between (`docs/decisions.md`). Promises that after `stop` the port is free
and open streams were given the grace period to end. Installs no signal handlers.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

import uvicorn

from cluster.errors import ConfigError
from router.http_protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

BACKLOG = 2048
IDLE_CONNECTION_S = 75  # kept open between requests


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process belongs to somebody else."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Take the address; `shared` lets several ingresses listen on the same port.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            msg = f"http.port: {port} is taken on {host} by another process; choose another port"
        elif error.errno == errno.EACCES:
            msg = f"http.port: {port} needs privileges this user lacks; choose one above 1023"
        else:
            msg = f"http.host: cannot listen on {host} ({error.strerror or error})"
        raise ConfigError(msg) from None
    return taken


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


class HttpListener:
    """One application on one socket."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        taken: socket.socket,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    ) -> None:
        """Serve `app` on a socket from `bind`; nothing is accepted before `run`."""
        self._socket = taken
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http=protocol,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_CONNECTION_S,
            )
        )

    @property
    def port(self) -> int:
        """The port listened on; differs from the configured one when that was 0."""
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Accept and serve until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self, grace_s: float) -> None:
        """Stop accepting; streams still open after `grace_s` are cut. `run` then returns."""
        self._server.config.timeout_graceful_shutdown = max(0, round(grace_s))
        self._server.should_exit = True
