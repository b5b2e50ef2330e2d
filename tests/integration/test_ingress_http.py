"""The HTTP interface on a real socket, with a scripted token layer: requests that succeed."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from cluster.types import FinishReason
from router.http.settings import HttpSettings
from router.ingress import build_app
from tests.support.http_server import serve
from tests.support.scripted_flow import FACTS, Script, ScriptedFlow, one_by_one
from tests.support.toy_tokenizers import byte_level

MODEL = FACTS.served_name
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}


@pytest.fixture
def flow():
    return ScriptedFlow(Script(one_by_one("Bonjour €!")))


@pytest.fixture
async def url(flow):
    async with serve(
        build_app(flow, HttpSettings(debug=True, version="1.2"), byte_level())
    ) as base:
        yield base


@pytest.fixture
async def http(url):
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


def blocks(response):
    """SSE blocks; every one must end in an empty line."""
    assert response.text.endswith("\n\n")
    return response.text[:-2].split("\n\n")


def events(response):
    """Data blocks as objects, without the end mark."""
    data = [block for block in blocks(response) if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in data)
    return [json.loads(block[6:]) for block in data if block != "data: [DONE]"]


async def test_openai_async_client_streams_and_completes(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**CHAT)
        assert whole.choices[0].message.content == "Bonjour €!"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == len("Bonjour €!".encode())
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Bonjour €!"
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
        completion = await client.completions.create(**TEXT, max_tokens=3)
        assert completion.choices[0].text == "Bonjour €!"
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_openai_sync_client_streams(url):
    def ask():
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(**TEXT, stream=True)
            text = "".join(chunk.choices[0].text for chunk in stream)
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", prompt="x")
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**CHAT, temperature=9)
            return text, caught.value.param

    assert await asyncio.to_thread(ask) == ("Bonjour €!", "temperature")


async def test_stream_layout(http):
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-diptych-prefill"] == "prefill-0"
    assert response.headers["x-diptych-decode"] == "decode-0"
    assert response.headers["x-diptych-cached-tokens"] == "2"
    assert blocks(response)[-1] == "data: [DONE]"
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


async def test_role_leaves_in_the_same_write_as_token_one(http, flow):
    flow.script.hold_after = 1
    async with http.stream(
        "POST", "/v1/chat/completions", json=CHAT | {"stream": True}
    ) as response:
        parts = response.aiter_raw()
        first = await anext(parts)
        assert first.count(b"data: ") == 2
        assert b'"role":"assistant"' in first
        assert b'"content":"B"' in first
        flow.script.resume.set()
        rest = b"".join([part async for part in parts])
        assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stops", [["jour"], ["r €", "our"], ["B"]])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_are_equal_streamed_and_whole(http, flow, stops, include):
    body = TEXT | {"stop": stops, "include_stop_str_in_output": include}
    whole = (await http.post("/v1/completions", json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = events(await http.post("/v1/completions", json=body | options))
    text = "".join(c["choices"][0]["text"] for c in streamed if c["choices"])
    assert text == whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["usage"] == whole["usage"]
    tokens = whole["usage"]["completion_tokens"]
    assert [g.stopped for g in flow.generations] == [{0: (FinishReason.STOP, tokens)}] * 2


async def test_several_prompts_and_token_ids(http, flow):
    response = await http.post("/v1/completions", json=TEXT | {"prompt": [[1, 2], [3]]})
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 2 * len("Bonjour €!".encode())
    assert flow.generations[0].request.prompts == ((1, 2), (3,))
    streamed = events(
        await http.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"], "stream": True})
    )
    for index in (0, 1):
        mine = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Bonjour €!"
        assert mine[-1]["finish_reason"] == "length"


async def test_continuous_usage(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await http.post(
        "/v1/completions", json=TEXT | {"stream": True, "stream_options": options}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
    assert counts == sorted(counts)
    assert counts[-1] == len("Bonjour €!".encode())


async def test_request_becomes_the_client_request(http, flow):
    headers = {
        "x-request-id": "mine",
        "x-diptych-session": "s1",
        "x-diptych-timeout-s": "2.5",
        "x-diptych-mode": "local",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    body = CHAT | {
        "max_tokens": 9,
        "max_completion_tokens": 7,
        "seed": -1,
        "temperature": 0.5,
        "top_p": None,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "service_tier": "flex",
        "user": "u",
        "metadata": {"a": None},
        "store": False,
    }
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    request = flow.generations[0].request
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-diptych-request-id"] == request.id
    assert request.prompts == ((*b"<user>hi", 256, *b"<assistant>"),)
    assert (request.client_request_id, request.session, request.mode) == ("mine", "s1", "local")
    assert (request.timeout_s, request.priority, request.tenant) == (2.5, "flex", "default")
    assert request.traceparent == headers["traceparent"]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (7, 2**64 - 1, 0.5)
    assert (sampling.eos_token_ids, sampling.stop_token_ids) == ((), (5,))
    assert request.max_tokens_given
    assert request.seed_given


async def test_default_limits(http, flow):
    await http.post("/v1/completions", json=TEXT)
    await http.post("/v1/chat/completions", json=CHAT)
    text, chat = (generation.request for generation in flow.generations)
    assert text.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == FACTS.max_len - len(chat.prompts[0])
    assert not chat.max_tokens_given
    assert text.sampling.eos_token_ids == (256,)


async def test_marks_and_release(http, flow):
    for stream in (False, True):
        await http.post("/v1/completions", json=TEXT | {"stream": stream})
        generation = flow.generations[-1]
        await asyncio.wait_for(generation.closed.wait(), 5)
        assert list(dict.fromkeys(generation.marks)) == ["first_byte", "done"]


async def test_local_prefill_has_no_prefill_header(http, flow):
    flow.script.prefill = None
    response = await http.post("/v1/completions", json=TEXT)
    assert "x-diptych-prefill" not in response.headers


async def test_long_prompt_is_encoded_and_counted(http, flow):
    response = await http.post("/v1/completions", json=TEXT | {"prompt": "x" * 20_000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "20000 tokens" in response.json()["error"]["message"]
    assert flow.generations == []


async def test_pages(http, flow):
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/version")).json() == {"version": "1.2"}
    assert (await http.get("/ready")).json() == {"status": "ready", "reasons": []}
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (await http.get("/debug/status")).json() == flow.status()
    await http.post("/v1/completions", json=TEXT)
    request_id = flow.generations[0].request.id
    assert (await http.get("/debug/requests")).json() == [{"id": request_id}]
    assert (await http.get(f"/debug/requests/{request_id}")).json() == {"id": request_id}
    assert (await http.head("/health")).status_code == 200
