"""Parsing and rendering of text completion requests, without I/O."""

from typing import Any

from appliance.server.chat.encoder_input import resolve_decoder_start
from appliance.server.chat.language import asked_language
from appliance.server.chat.parsed import Plan, Served
from appliance.server.chat.sampling import logprob_count, named_tokens
from appliance.server.chat.sequences import (
    PromptOptions,
    build_prompt,
    check_routes,
    check_stream,
    reading_of,
    refuse_unsupported,
)
from appliance.server.chat.window import check_text
from appliance.server.schema.completions import CompletionRequest
from engine.api.errors import RequestError


def _texts_or_ids(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def plan_completion(body: CompletionRequest, served: Served) -> Plan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    config, tokenizer = served.config, served.text.tokenizer
    refuse_unsupported(body)
    if body.thinking_token_budget not in (None, -1):
        raise RequestError(
            "thinking_token_budget is only supported for chat messages. Use /v1/chat/completions.",
            "thinking_token_budget",
        )
    if body.prompt_embeds is not None:
        raise RequestError("prompt_embeds is not supported by this server; send prompt.", "prompt_embeds")
    if body.suffix:
        raise RequestError("suffix is not supported by this model.", "suffix")
    prompts = _texts_or_ids(body.prompt)
    if len(prompts) > config.limits.max_prompts:
        message = (
            f"prompt has {len(prompts)} entries; the server's limits.max_prompts allows {config.limits.max_prompts}."
        )
        raise RequestError(message, "prompt")
    logprobs = logprob_count("sample", "logprobs", body.logprobs, config)
    prompt_logprobs = logprob_count("prompt", "prompt_logprobs", body.prompt_logprobs, config)
    check_stream(body, prompt_logprobs)
    check_routes(body, config)
    if body.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0) if -1 not in (logprobs, prompt_logprobs) else -1
    named = named_tokens(body.logprob_token_ids, logprobs, config)
    scores_only = body.echo and body.max_tokens == 0
    if named and scores_only:
        raise RequestError(
            "logprob_token_ids requires a reply, but echo with max_tokens=0 generates none.", "logprob_token_ids"
        )
    language = asked_language(body)
    decoder_start = resolve_decoder_start(body, config, tokenizer)
    unsaid = 16 if config.encoder is None else config.sampling.max_tokens
    options = PromptOptions(
        tokens=unsaid if body.max_tokens is None else body.max_tokens,
        tokens_param="max_tokens",
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=named,
        grammar=None if language is None else language.grammar(served.text.special_id),
        scores_only=scores_only,
        decoder_start=decoder_start,
    )
    n = body.n or 1
    planned = []
    for at, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                check_text(prompt, tokenizer, config, None if config.encoder is None else config.encoder.max_input)
            prompt = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
        planned.append(build_prompt(prompt, body, options, served, at * n))
    return Plan(tuple(planned), reading_of(body, served), "" if language is None else language.param)
