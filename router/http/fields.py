"""Rules about single request fields: which exist, which are refused by name, which do nothing.

Owns the lists behind the interface's promise that no field is dropped in silence: a known field
works, an unbuilt one is refused unless it has its neutral value, an unknown one is refused or
reported. Also the parsers of fields whose JSON type varies. `null` means absent. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from cluster.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

UnknownFields = Literal["refuse", "ignore"]
Prompt = str | tuple[int, ...]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_024
MAX_PROMPTS = 1_024

NO_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)

_TEXT_FORMAT = {"type": "text"}

# Fields not built yet, with the values that ask for nothing. `==` also lets 0.0 pass for 0.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": (_TEXT_FORMAT,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> NoReturn:
    """Refuse a field's value."""
    raise RequestError(message, param=param, code=code)


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object without its nulls. Raises RequestError if it is none."""
    try:
        cleaned = without_nulls(msgspec.json.decode(body))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        invalid(f"the body is not valid JSON: {error}", None, "invalid_json")
    except RecursionError:
        invalid("the body is nested too deeply", None, "invalid_json")
    if not isinstance(cleaned, dict):
        invalid("the body must be a JSON object", None, "invalid_json")
    return cleaned


def without_nulls(value: object) -> object:
    """`null` means absent: drop such members of objects, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value


def check_names(
    fields: Mapping[str, Any], known: Collection[str], unknown: UnknownFields, prefix: str = ""
) -> tuple[str, ...]:
    """Refuse unbuilt fields and, unless they are to be ignored, unknown ones.

    Args:
        fields: a JSON object of the request.
        known: names that the caller handles.
        unknown: what to do with names nobody handles.
        prefix: path of the object within the request, ending in a dot.

    Returns:
        Full paths of the unknown fields that were ignored, sorted.
    """
    ignored = []
    for name in fields:
        if not prefix and name in _NEUTRAL:
            _check_neutral(name, fields[name])
        elif name not in known:
            ignored.append(f"{prefix}{name}")
    ignored.sort()
    if ignored and unknown == "refuse":
        path = ignored[0]
        invalid(f"Unrecognized request argument supplied: {path}", path, "unknown_parameter")
    return tuple(ignored)


def _check_neutral(name: str, value: object) -> None:
    neutral = _NEUTRAL[name]
    if any(value == item and _same_kind(value, item) for item in neutral):
        return
    allowed = " or ".join(msgspec.json.encode(item).decode() for item in neutral)
    hint = f"; leave it out or send {allowed}" if neutral else ""
    raise UnsupportedError(f"'{name}' is not supported by this server{hint}", param=name)


def _same_kind(value: object, neutral: object) -> bool:
    """JSON's true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool)


# ---- fields of several types --------------------------------------------------------------------


def parse_prompt(value: object) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either: one entry per prompt."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        invalid("prompt must be a string, a list of strings or token ids", "prompt", "invalid_type")
    if not value:
        invalid("prompt must not be empty", "prompt")
    if _all_of(value, int):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        invalid(f"prompt has more than {MAX_PROMPTS} entries", "prompt")
    if _all_of(value, str):
        return tuple(value)
    if all(isinstance(item, list) and _all_of(item, int) for item in value):
        if not all(value):
            invalid("prompt must not hold an empty list", "prompt")
        return tuple(tuple(item) for item in value)
    invalid(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
        "invalid_type",
    )


def _all_of(items: list[Any], kind: type) -> bool:
    """Exactly that type: true and false are no integers here."""
    return all(type(item) is kind for item in items)


def parse_stop(value: object) -> tuple[str, ...]:
    """One stop string or several."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not _all_of(stops, str):
        invalid("stop must be a string or a list of strings", "stop", "invalid_type")
    if len(stops) > MAX_STOP_STRINGS:
        invalid(f"stop may hold at most {MAX_STOP_STRINGS} strings", "stop")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        invalid(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(dict.fromkeys(stops))


# ---- messages -----------------------------------------------------------------------------------

_ROLES: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TOOL_ROLES = frozenset({"tool", "function"})


def parse_messages(value: object) -> tuple[dict[str, str], ...]:
    """Chat messages as role and text, which is all a template sees of them."""
    if not isinstance(value, list):
        invalid("messages must be a list of objects", "messages", "invalid_type")
    if not value:
        invalid("messages must not be empty", "messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        invalid(f"{path} must be an object", path, "invalid_type")
    role = value.get("role")
    if role is None:
        invalid(f"{path} has no role", f"{path}.role", "missing_required_parameter")
    if not isinstance(role, str):
        invalid(f"{path}.role must be a string", f"{path}.role", "invalid_type")
    if role in _TOOL_ROLES:
        raise UnsupportedError(
            f"role '{role}' is not supported by this server", param=f"{path}.role"
        )
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        invalid(f"{path}.role is '{role}'; it must be one of {known}", f"{path}.role")
    if "content" not in value:
        invalid(f"{path} has no content", f"{path}.content", "missing_required_parameter")
    return {"role": _ROLES[role], "content": _content(value["content"], f"{path}.content")}


def _content(value: object, path: str) -> str:
    """A string, or text parts joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        invalid(f"{path} must be a string or a list of text parts", path, "invalid_type")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _part(value: object, path: str) -> str:
    if not isinstance(value, dict):
        invalid(f"{path} must be an object", path, "invalid_type")
    kind = value.get("type")
    if kind != "text":
        if isinstance(kind, str):
            raise UnsupportedError(
                f"content of type '{kind}' is not supported", param=f"{path}.type"
            )
        invalid(f"{path} has no type", f"{path}.type", "missing_required_parameter")
    text = value.get("text")
    if not isinstance(text, str):
        invalid(f"{path}.text must be a string", f"{path}.text", "invalid_type")
    return text
