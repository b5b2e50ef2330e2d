"""The HTTP interface on a real socket: refusals, failures before and after token 1, disconnects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from cluster.errors import (
    CapacityError,
    DeadlineError,
    DiptychError,
    HandoffError,
    NoDecodeWorkersError,
    WorkerLostError,
)
from router.generation import Readiness
from router.http.settings import HttpSettings, IngressObserver, KeyGate
from router.ingress import build_app
from tests.support.http_server import serve
from tests.support.scripted_flow import FACTS, Script, ScriptedFlow, one_by_one
from tests.support.toy_tokenizers import byte_level

TEXT = {"model": FACTS.served_name, "prompt": "hi"}
SETTINGS = HttpSettings(early_headers_s=0.05, keepalive_s=0.05, max_body_bytes=4_096)


class Book(IngressObserver):
    """Statuses as they are counted."""

    def __init__(self):
        self.codes = []
        self.gaps = 0
        self.counted = asyncio.Event()

    def request_answered(self, code):
        self.codes.append(code)
        self.counted.set()

    def token_gap(self, gap_s, num_tokens):
        self.gaps += num_tokens


@pytest.fixture
def flow():
    return ScriptedFlow(Script(one_by_one("abc")))


@pytest.fixture
def book():
    return Book()


@pytest.fixture
async def http(flow, book):
    async with (
        serve(build_app(flow, SETTINGS, byte_level(), observer=book)) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


def error_of(response):
    """The error object; its shape is always the same."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_too_long_body(http, flow):
    response = await http.post("/v1/completions", json=TEXT | {"prompt": "x" * 10_000})
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert flow.generations == []


async def test_unknown_model_path_and_method(http):
    response = await http.post("/v1/completions", json=TEXT | {"model": "gpt"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert (await http.get("/v1/models/org/other")).status_code == 404
    assert error_of(await http.get("/v1/nothing"))["code"] == "not_found"
    wrong = await http.get("/v1/completions")
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert (await http.head("/v1/completions")).status_code == 405
    assert (await http.get("/debug/status")).status_code == 404
    assert (await http.get("/docs")).status_code == 404


@pytest.mark.parametrize("label", ["x" * 128, "a#b/c d", "%0Aevil"])
async def test_equal_labels_are_served_independently(http, flow, label):
    headers = {"x-request-id": label}
    posts = [http.post("/v1/completions", json=TEXT, headers=headers) for _ in range(2)]
    first, second = await asyncio.gather(*posts)
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == label
    assert first.headers["x-diptych-request-id"] != second.headers["x-diptych-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("full", retry_after_s=2.25), 503, "overloaded"),
        (NoDecodeWorkersError("none"), 503, "no_decode_workers"),
        (DeadlineError("late"), 503, "deadline_exceeded"),
        (HandoffError("lost"), 503, "handoff_failed"),
        (WorkerLostError("gone"), 503, "worker_lost"),
        (DiptychError("bug"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_token_one_are_a_status(
    http, flow, book, error, status, code, stream
):
    flow.script = Script(error=error)
    response = await http.post("/v1/completions", json=TEXT | {"stream": stream})
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    if isinstance(error, CapacityError) and error.retry_after_s == 2.25:
        assert response.headers["retry-after"] == "3"
        assert response.headers["retry-after-ms"] == "2250"
    await asyncio.wait_for(flow.generations[0].closed.wait(), 5)
    assert book.codes == [status]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a~"}, "prompt"),
        ("/v1/completions", {"prompt": ["ab", "a~"]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 126]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a~"}]}, "messages"),
    ],
)
async def test_tokens_the_model_lacks_are_refused(http, flow, path, body, param):
    flow.facts = replace(FACTS, vocab_size=126)  # the tokenizer knows more
    response = await http.post(path, json={"model": FACTS.served_name, **body})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert flow.generations == []


async def test_refusal_by_the_flow(http, flow):
    flow.refusal = CapacityError("the line is full")
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


async def test_failure_after_token_one_is_an_event_without_end_mark(http, flow, book):
    flow.script.error = WorkerLostError("decode-0 died")
    response = await http.post("/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 200
    *chunks, last = response.text[:-2].split("\n\n")
    assert json.loads(last[6:])["error"]["code"] == "worker_lost"
    assert "".join(json.loads(c[6:])["choices"][0]["text"] for c in chunks) == "abc"
    assert "[DONE]" not in response.text
    whole = await http.post("/v1/completions", json=TEXT)
    assert (whole.status_code, error_of(whole)["code"]) == (503, "worker_lost")
    assert book.codes == [503, 503]


async def test_unexpected_failure_is_a_500_and_is_released(http, flow, book, caplog):
    flow.script = Script(error=KeyError("bug"))
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 500
    flow.script = Script(one_by_one("a"), error=KeyError("bug"))
    response = await http.post("/v1/completions", json=TEXT | {"stream": True})
    assert "internal_error" in response.text
    assert "[DONE]" not in response.text
    assert all(generation.closed.is_set() for generation in flow.generations)
    assert book.codes == [500, 500]
    assert "failed unexpectedly" in caplog.text


async def test_early_headers_keep_alive_and_late_failure(http, flow):
    flow.script = Script(error=DeadlineError("late"), hold=asyncio.Event())
    async with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
        assert response.status_code == 200
        assert "x-diptych-decode" not in response.headers
        assert "x-diptych-request-id" in response.headers
        parts = response.aiter_raw()
        assert await anext(parts) == b": keep-alive\n\n"
        assert await anext(parts) == b": keep-alive\n\n"
        flow.script.hold.set()
        rest = b"".join([part async for part in parts])
        assert b"deadline_exceeded" in rest
        assert b"[DONE]" not in rest


async def test_silent_stream_is_kept_alive(http, flow):
    flow.script.hold_after = 1
    async with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
        parts = response.aiter_raw()
        assert b'"text":"a"' in await anext(parts)
        assert await anext(parts) == b": keep-alive\n\n"
        flow.script.resume.set()
        assert (b"".join([part async for part in parts])).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_disconnect_releases_at_once(flow, book, stream, late):
    flow.script = Script(one_by_one("abc"), hold=None if late else asyncio.Event(), hold_after=1)
    settings = HttpSettings()
    async with (
        serve(build_app(flow, settings, byte_level(), observer=book)) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        post = client.post("/v1/completions", json=TEXT | {"stream": stream})
        task = asyncio.create_task(post)
        await asyncio.wait_for(flow.started.wait(), 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(flow.generations[0].closed.wait(), 5)
        await asyncio.wait_for(book.counted.wait(), 5)
    assert flow.generations[0].marks[-1] == "disconnect"
    assert book.codes == [499]


async def test_readiness(http, flow):
    flow.readiness = Readiness("degraded", ("no prefill workers",))
    response = await http.get("/ready")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    flow.readiness = Readiness("unready", ("no decode workers",))
    response = await http.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "unready", "reasons": ["no decode workers"]}


async def test_a_page_that_fails_is_a_500_in_our_shape(http, flow, monkeypatch):
    monkeypatch.delattr(type(flow), "ready")
    response = await http.get("/ready")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert (await http.get("/health")).status_code == 200


async def test_unknown_fields_can_be_ignored(flow):
    settings = HttpSettings(unknown_fields="ignore")
    body = TEXT | {
        "zeta": 1,
        "alpha": None,
        "beta\n": 2,
        "stream": True,
        "stream_options": {"x": 1},
    }
    async with (
        serve(build_app(flow, settings, byte_level())) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-diptych-ignored"] == "beta?, zeta, stream_options.x"
        refused = await client.post("/v1/completions", json=body | {"n": 2})
        assert error_of(refused)["code"] == "unsupported_parameter"


async def test_keys(flow):
    from hashlib import sha256

    def digest(key):
        return sha256(key.encode()).hexdigest()

    gate = KeyGate({digest("sk-a"): "acme"}, {digest("sk-root")})
    app = build_app(flow, HttpSettings(debug=True), byte_level(), gate=gate)
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sk-a"}):
            response = await client.post("/v1/completions", json=TEXT, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        mine = {"authorization": "Bearer sk-a"}
        assert (await client.post("/v1/completions", json=TEXT, headers=mine)).status_code == 200
        assert flow.generations[0].request.tenant == "acme"
        assert (await client.get("/debug/status", headers=mine)).status_code == 401
        root = {"authorization": "Bearer sk-root"}
        assert (await client.get("/debug/status", headers=root)).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_cors(flow):
    origin = {"origin": "https://app.example"}
    settings = HttpSettings(cors_origins=("https://app.example",))
    async with (
        serve(build_app(flow, settings, byte_level())) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        preflight = await client.options(
            "/v1/chat/completions", headers=origin | {"access-control-request-method": "POST"}
        )
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        response = await client.post("/v1/completions", json=TEXT, headers=origin)
        assert "x-diptych-request-id" in response.headers["access-control-expose-headers"]


async def test_token_gaps_are_one_fewer_than_tokens(http, flow, book):
    flow.script = Script([(97,), (98, 99), (100,)])
    for stream in (False, True):
        await http.post("/v1/completions", json=TEXT | {"stream": stream})
    assert book.gaps == 6
