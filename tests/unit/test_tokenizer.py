"""The tokenizer reads model folders without torch; templates run in a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster.chat_template import ChatTemplate
from cluster.errors import ModelError, RequestError, UnsupportedError
from cluster.tokenizer import Tokenizer
from tests.support.toy_tokenizers import byte_level


def test_loading_needs_neither_torch_nor_transformers():
    program = (
        "import sys, cluster.tokenizer, router.http.textstream;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def write_folder(folder, **config):
    byte_level()._raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_template_may_be_a_string_a_named_list_or_a_file(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"}
    assert Tokenizer.load(write_folder(tmp_path, **config)).render_chat([]) == "<s>one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    assert Tokenizer.load(write_folder(tmp_path, chat_template=named)).render_chat([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert Tokenizer.load(tmp_path).render_chat([]) == "three"


def test_model_without_template_refuses_chat(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(UnsupportedError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_truncation_and_padding_in_the_file_are_off(tmp_path):
    raw = byte_level()._raw
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abcd", add_special_tokens=True) == [97, 98, 99, 100]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_tokenizer_names_the_file(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def render(source, messages=({"role": "user", "content": "hi"},)):
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages)


def test_template_helpers():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}a{% endgeneration %}{{ eos_token }}") == "a</s>"
    assert render("{% if add_generation_prompt %}\ngo\n{% endif %}\n") == "go\n"


def test_template_refusals_are_the_clients_error():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    with pytest.raises(RequestError):
        render("{{ messages[7].content + 1 }}")


def test_templates_are_sandboxed():
    with pytest.raises(RequestError):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError):
        render("{{ messages.append(1) }}")


def test_template_that_does_not_compile_is_the_models_error():
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})
