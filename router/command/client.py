"""The command line as an HTTP client of a cluster.

Speaks the public API only, so that `chat` shows what any other client would see. Every failure is
a `DiptychError` with one sentence.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from cluster.errors import DiptychError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 5.0
RECORD_TRIES = 20
RECORD_PAUSE_S = 0.05


@dataclass(slots=True)
class ChatReply:
    """One streamed answer: iterate for the text; headers and usage are set by then."""

    lines: Iterator[str]
    headers: httpx.Headers
    usage: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they arrive.

        Raises:
            DiptychError: the stream ended in an error or was cut.
        """
        for line in self.lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DiptychError(event["error"]["message"])
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
        raise DiptychError("the answer broke off before its end")


class ClusterClient:
    """Talks to the ingress at one URL."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        """Open no connection yet."""
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            trust_env=False,  # a proxy of the environment has no business on loopback
        )

    def close(self) -> None:
        """Close kept connections."""
        self._http.close()

    def is_ready(self) -> bool:
        """Whether requests would be served now; False also while nothing listens."""
        try:
            return self._http.get("/ready", timeout=CONNECT_S).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def status(self) -> dict[str, Any]:
        """The object of `status --json`."""
        return self._get("/debug/status")

    def record(self, request_id: str) -> dict[str, Any]:
        """What the cluster remembers of one request."""
        return self._get(f"/debug/requests/{request_id}")

    def finished_record(self, request_id: str) -> dict[str, Any]:
        """The same, asked again until the books of the request are closed, for a short while."""
        pause = threading.Event()
        for _ in range(RECORD_TRIES):
            record = self.record(request_id)
            if record["status"] != "running":
                break
            pause.wait(RECORD_PAUSE_S)
        return record

    def model(self) -> str:
        """The name of the served model."""
        name: str = self._get("/v1/models")["data"][0]["id"]
        return name

    def chat(self, model: str, messages: list[dict[str, str]], max_tokens: int) -> Chat:
        """One streamed chat completion, as a context manager."""
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Chat(self._http, body)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise _unreachable(self.url, error) from None
        if response.is_error:
            raise DiptychError(_message(response))
        answer: dict[str, Any] = response.json()
        return answer


class Chat:
    """The open connection of one streamed chat; leaving it early cancels the request."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        """Send nothing before `__enter__`."""
        self._http = http
        self._stream = http.stream("POST", "/v1/chat/completions", json=body)

    def __enter__(self) -> ChatReply:
        """Send the request and wait for its headers, which leave with token 1.

        Raises:
            DiptychError: nobody listens, or the request was refused.
        """
        try:
            response = self._stream.__enter__()
        except httpx.HTTPError as error:
            raise _unreachable(str(self._http.base_url), error) from None
        if response.is_error:
            response.read()
            raise DiptychError(_message(response))
        return ChatReply(_lines(response), response.headers)

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._stream.__exit__(None, None, None)


def _lines(response: httpx.Response) -> Iterator[str]:
    try:
        yield from response.iter_lines()
    except httpx.HTTPError as error:
        raise DiptychError(f"the answer broke off: {error}") from None


def _unreachable(url: str, error: httpx.HTTPError) -> DiptychError:
    return DiptychError(f"no cluster answers at {url} ({error or type(error).__name__})")


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}"
