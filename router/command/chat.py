"""`diptych chat`: one streamed answer, and where its time went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cluster.clock import monotonic_s
from cluster.errors import DiptychError

if TYPE_CHECKING:
    from router.command.client import ClusterClient
    from router.command.console import Console


def chat(client: ClusterClient, console: Console, text: str | None, max_tokens: int) -> int:
    """Answer `text`, or hold a conversation over the terminal; returns the exit code."""
    model = client.model()
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise DiptychError("nothing to say: give a text as argument or on standard input")
    if text is not None:
        ask(client, console, model, [{"role": "user", "content": text}], max_tokens)
        return 0
    messages: list[dict[str, str]] = []
    console.say(f"{model} at {client.url}; an empty line ends the conversation")
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        answer = ask(client, console, model, messages, max_tokens)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def ask(
    client: ClusterClient,
    console: Console,
    model: str,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> str:
    """Stream one answer to the console, then its times; returns the answer."""
    started_s = monotonic_s()
    first_s: float | None = None
    pieces: list[str] = []
    with client.chat(model, messages, max_tokens) as reply:
        for piece in reply:
            first_s = first_s or monotonic_s()
            pieces.append(piece)
            console.say(piece, end="")
        ended_s = monotonic_s()
        console.say()
        request_id = reply.headers.get("x-diptych-request-id")
        usage = reply.usage
    seen = f"here: {ended_s - started_s:.3f} s in all"
    if first_s is not None:
        seen += f", first text after {first_s - started_s:.3f} s"
    console.say(f"\n{seen}, {usage.get('completion_tokens', '?')} tokens")
    if request_id:
        _explain(client, console, request_id)
    return "".join(pieces)


def _explain(client: ClusterClient, console: Console, request_id: str) -> None:
    try:
        record = client.finished_record(request_id)
    except DiptychError as error:
        console.say(f"(no account of its time: {error.message})")
        return
    rows = [
        (phase["name"], phase.get("worker") or "", _ms(phase["start_s"]), _ms(phase["duration_s"]))
        for phase in record["phases"]
    ]
    if record.get("unexplained_s") is not None:
        rows.append(("unexplained", "", "", _ms(record["unexplained_s"])))
    console.table(("where the time went", "worker", "from ms", "took ms"), rows)
    console.say(_summary(record))


def _summary(record: dict[str, Any]) -> str:
    parts = [f"{record['prompt_tokens']} prompt tokens ({record['cached_tokens']} cached)"]
    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end")):
        if record.get(key) is not None:
            parts.append(f"{name} {_ms(record[key])} ms")
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
