"""Real answers through both workers, asked by the official client."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.cluster_process import run_cli

from .conftest import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster_process import ClusterProcess

BLOCK_TOKENS = 16
# SmolLM2-135M in bfloat16: 30 layers, K and V, 3 heads of 64
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 2


def ask(client: OpenAI, text: str, max_tokens: int = 24) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def worker(cluster: ClusterProcess, name: str) -> dict[str, Any]:
    return next(w for w in cluster.status()["workers"] if w["id"] == name)


def test_streamed_chat_names_paris(client: OpenAI):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 2


async def test_async_client_gets_the_same_answer(cluster: ClusterProcess, client: OpenAI):
    question = "Name three colours."
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as other:
        answer = await other.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=24,
            temperature=0,
        )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_different_prompts_get_different_answers(client: OpenAI):
    questions = ["What is the capital of Japan?", "What colour is the sky?", "Who wrote Hamlet?"]
    assert len({ask(client, question) for question in questions}) == 3


def test_long_prompt_passes_both_workers_in_whole_blocks(cluster: ClusterProcess, client: OpenAI):
    before = worker(cluster, "prefill-0"), worker(cluster, "decode-0")
    ids = [(7 * i) % 4000 + 100 for i in range(650)]
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt=ids, max_tokens=8, temperature=0
    )
    usage = answer.parse().usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (650, 8)
    assert answer.headers["x-diptych-prefill"] == "prefill-0"
    assert answer.headers["x-diptych-decode"] == "decode-0"
    after = settled(cluster)
    num_blocks = -(-650 // BLOCK_TOKENS)
    assert after[0]["prefill_tokens"] - before[0]["prefill_tokens"] == 650
    assert after[1]["prefill_tokens"] == before[1]["prefill_tokens"]
    sent = after[0]["handoff_bytes_sent"] - before[0]["handoff_bytes_sent"]
    received = after[1]["handoff_bytes_received"] - before[1]["handoff_bytes_received"]
    assert sent == received == num_blocks * BLOCK_BYTES


def settled(cluster: ClusterProcess) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both workers once they report that they hold nothing; snapshots come once a second."""
    for _ in polls(20):
        found = worker(cluster, "prefill-0"), worker(cluster, "decode-0")
        busy = [w["running"] + w["waiting"] + w["open_transfers"] + w["tickets"] for w in found]
        if not any(busy) and not any(w["blocks"]["live"] for w in found):
            return found
    raise AssertionError(f"never idle: {found}")


def polls(limit_s: float) -> Iterator[float]:
    """Attempts to see something that has no event to wait for, for at most `limit_s`."""
    started_s = time.monotonic()
    while (passed_s := time.monotonic() - started_s) < limit_s:
        yield passed_s


def test_over_long_prompt_is_refused_before_any_compute(cluster: ClusterProcess, client: OpenAI):
    before = worker(cluster, "prefill-0")["prefill_tokens"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=8)
    assert caught.value.code == "context_length_exceeded"
    assert worker(cluster, "prefill-0")["prefill_tokens"] == before


def test_command_line_shows_status_and_where_time_went(cluster: ClusterProcess):
    chat = run_cli("chat", "--url", cluster.url, "--max-tokens", "8", "Say hello.")
    assert chat.returncode == 0, chat.stderr
    for phase in ("tokenize", "prefill.compute", "handoff", "decode", "TTFT"):
        assert phase in chat.stdout
    status = run_cli("status", "--url", cluster.url)
    assert status.returncode == 0
    assert "prefill-0" in status.stdout
    assert "decode-0" in status.stdout


def test_killed_decode_worker_means_typed_503_until_it_is_back(
    cluster: ClusterProcess, client: OpenAI
):
    old = worker(cluster, "decode-0")
    os.kill(old["pid"], signal.SIGKILL)
    refusals: list[openai.APIStatusError] = []
    for _ in polls(90):
        try:
            answer = ask(client, "What is the capital of France?")
        except openai.APIStatusError as error:
            refusals.append(error)
        else:
            break
    assert "Paris" in answer
    assert refusals
    assert {error.status_code for error in refusals} == {503}
    assert {error.code for error in refusals} <= {"no_decode_workers", "worker_lost", "overloaded"}
    assert all("retry-after" in error.response.headers for error in refusals)
    new = worker(cluster, "decode-0")
    assert new["incarnation"] != old["incarnation"]
    assert new["pid"] != old["pid"]
