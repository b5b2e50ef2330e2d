"""From a validated body to a `ClientRequest`: model, prompt tokens, limits.

Owns the template and tokenisation of a request and every check that needs token counts, so that a
request which cannot be served is refused before any worker hears of it. Long text is encoded in a
thread. No HTTP, no torch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.clock import monotonic_s
from cluster.errors import ContextLengthError, ModelNotFoundError
from cluster.tokenizer import LONG_TEXT_CHARS, Tokenizer
from cluster.types import ModelFacts, SamplingParams
from router.generation import ClientRequest
from router.http.fields import invalid
from router.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, GenerationBody

if TYPE_CHECKING:
    from router.http.fields import Prompt
    from router.http.headers import Labels

GREEDY_BELOW = 1e-5  # temperatures below this would overflow the logits


async def take_in(
    body: ChatBody | CompletionBody,
    labels: Labels,
    *,
    request_id: str,
    tenant: str,
    received_s: float,
    facts: ModelFacts,
    tokenizer: Tokenizer,
) -> ClientRequest:
    """Tokenise and check a request.

    Args:
        body: the validated body.
        labels: the validated headers.
        request_id: our id.
        tenant: whose key it came with.
        received_s: monotonic, when the body had been read.
        facts: the served model.
        tokenizer: the served model's.

    Raises:
        ModelNotFoundError: another model is asked for.
        ContextLengthError: prompt and output cannot fit the model.
        RequestError: the prompt is empty, holds unknown ids, or the template refuses it.
    """
    if body.model != facts.served_name:
        raise ModelNotFoundError(
            f"the model '{body.model[:256]}' does not exist; this server has '{facts.served_name}'",
            param="model",
        )
    started_s = monotonic_s()
    prompts = await _prompts(body, tokenizer, facts.vocab_size)
    tokenize_s = monotonic_s() - started_s
    max_tokens = _max_tokens(body, max(map(len, prompts)), facts.max_len)
    return ClientRequest(
        id=request_id,
        client_request_id=labels.request_id or request_id,
        kind="chat" if isinstance(body, ChatBody) else "completion",
        model=facts.served_name,
        prompts=prompts,
        n=body.n,
        sampling=_sampling(body, max_tokens, facts),
        seed_given=body.seed is not None,
        stream=body.stream,
        timeout_s=labels.timeout_s,
        mode=labels.mode,
        tenant=tenant,
        session=labels.session,
        traceparent=labels.traceparent,
        priority=body.priority,
        received_s=received_s,
        tokenize_s=tokenize_s,
        max_tokens_given=body.output_tokens is not None,
    )


async def _prompts(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    if isinstance(body, ChatBody):
        text = tokenizer.render_chat(body.messages)
        prompts = [await _encode(text, tokenizer, param="messages", add_special_tokens=False)]
        param = "messages"
    else:
        prompts = [await _prompt(prompt, tokenizer) for prompt in body.prompt]
        param = "prompt"
    for prompt in prompts:  # of text too: some tokenizers know more tokens than their model
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            invalid(f"{param}: token ids must be from 0 to {vocab_size - 1}", param)
    return tuple(prompts)


async def _prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await _encode(prompt, tokenizer, param="prompt", add_special_tokens=True)
    return prompt


async def _encode(
    text: str, tokenizer: Tokenizer, *, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    if len(text) > LONG_TEXT_CHARS:
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    else:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not ids:
        invalid(f"{param} has no tokens", param)
    return tuple(ids)


def _max_tokens(body: ChatBody | CompletionBody, prompt_tokens: int, max_len: int) -> int:
    """The client's limit, or the default within what the context leaves."""
    room = max_len - prompt_tokens
    wanted = body.output_tokens
    what = "messages" if isinstance(body, ChatBody) else "prompt"
    if room < 1:
        raise ContextLengthError(
            f"this model's context holds {max_len} tokens, but your {what} alone has "
            f"{prompt_tokens} tokens",
            param=what,
        )
    if wanted is not None and wanted > room:
        raise ContextLengthError(
            f"this model's context holds {max_len} tokens, but you asked for "
            f"{prompt_tokens + wanted}: {prompt_tokens} in the {what} and {wanted} of output",
            param=what,
        )
    default = room if isinstance(body, ChatBody) else min(DEFAULT_COMPLETION_TOKENS, room)
    max_tokens = default if wanted is None else wanted
    if body.min_tokens > max_tokens:
        invalid(f"min_tokens is {body.min_tokens}, but only {max_tokens} fit", "min_tokens")
    return max_tokens


def _sampling(body: GenerationBody, max_tokens: int, facts: ModelFacts) -> SamplingParams:
    if any(token_id >= facts.vocab_size for token_id in body.stop_token_ids):
        invalid(f"stop_token_ids must be below {facts.vocab_size}", "stop_token_ids")
    greedy = body.temperature < GREEDY_BELOW or body.top_p == 0  # the top token alone remains
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else body.temperature,
        top_p=1.0 if greedy else body.top_p,
        seed=body.seed_u64 or 0,
        min_tokens=body.min_tokens,
        eos_token_ids=() if body.ignore_eos else facts.eos_token_ids,
        stop_token_ids=body.stop_token_ids,
    )
