"""Validation of bodies and headers: every refusal names its field, before any compute.

Through the whole application, but without a socket.
"""

from __future__ import annotations

import httpx
import pytest

from router.http.settings import HttpSettings
from router.ingress import build_app
from tests.support.scripted_flow import FACTS, Script, ScriptedFlow, one_by_one
from tests.support.toy_tokenizers import byte_level

TEXT = {"model": FACTS.served_name, "prompt": "hi"}
CHAT = {"model": FACTS.served_name, "messages": [{"role": "user", "content": "hi"}]}
TOKENIZER = byte_level()


@pytest.fixture
def flow():
    return ScriptedFlow(Script(one_by_one("abc")))


@pytest.fixture
async def http(flow):
    app = build_app(flow, HttpSettings(), TOKENIZER)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        yield client


def error_of(response):
    """The error object; its shape is always the same."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"logprobs": 1}, "logprobs", "unsupported_parameter"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"top_k": 5}, "top_k", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "invalid_value"),
        ({"min_tokens": 20}, "min_tokens", "invalid_value"),
        ({"max_tokens": 255}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 256}, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[1], []]}, "prompt", "invalid_value"),
        ({"prompt": [300]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_type"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"stop": ["a", 1]}, "stop", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value"),
        ({"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_type"),
        ({"service_tier": "gold"}, "service_tier", "invalid_value"),
    ],
)
async def test_bad_fields_are_named_before_any_compute(http, flow, extra, param, code):
    for stream in (False, True):
        body = TEXT | {"stream": stream} | extra
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == (param, code)
        assert error["type"] == "invalid_request_error"
    assert flow.generations == []


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"prompt": "x"}, "prompt", "unknown_parameter"),
    ],
)
async def test_bad_chat_fields_are_named(http, extra, param, code):
    response = await http.post("/v1/chat/completions", json=CHAT | extra)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)


async def test_neutral_values_and_fields_without_effect_pass(http):
    body = CHAT | {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "user": "u",
        "metadata": {},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "store": False,
        "messages": [
            {"role": "developer", "content": "d", "unknown": 1},
            {"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}]},
        ],
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert "x-diptych-ignored" not in response.headers


NESTED = b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 1000, NESTED])
async def test_bodies_that_are_no_json_object(http, body):
    response = await http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-id", "x" * 129),
        ("x-request-id", "é"),
        ("x-request-id", "tab\there"),
        ("x-diptych-timeout-s", "0"),
        ("x-diptych-timeout-s", "-1"),
        ("x-diptych-timeout-s", "1e3"),
        ("x-diptych-timeout-s", "nan"),
        ("x-diptych-timeout-s", "soon"),
        ("x-diptych-timeout-s", ""),
        ("x-diptych-session", "x" * 200),
    ],
)
async def test_bad_headers(http, name, value):
    headers = {name: value.encode("latin-1")}
    response = await http.post("/v1/completions", json=TEXT, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == name
    assert response.headers["x-request-id"] == response.headers["x-diptych-request-id"]
