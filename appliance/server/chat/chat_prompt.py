"""Parsing and rendering of chat requests, without I/O. The other chat APIs are converted to chat requests first."""

from typing import Any

from appliance.config.gateway import GatewayConfig
from appliance.output_formats.constraint import Constraint
from appliance.output_formats.declaration import OutputFormat
from appliance.server.chat.conversation import Rendered, render, tokenize
from appliance.server.chat.language import asked_language
from appliance.server.chat.messages import spoken_text
from appliance.server.chat.parsed import ChatPlan, Served
from appliance.server.chat.sampling import logprob_count, named_tokens
from appliance.server.chat.sequences import (
    PromptOptions,
    build_prompt,
    check_routes,
    check_stream,
    reading_of,
    refuse_unsupported,
)
from appliance.server.chat.thinking import thinking_limit, thinking_of
from appliance.server.chat.tools import tool_grammar, tool_use
from appliance.server.chat.window import check_text
from appliance.server.schema.chat import ChatRequest
from engine.api.errors import RequestError


def _top_logprobs(body: ChatRequest, config: GatewayConfig) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs requires logprobs=true.", "top_logprobs")
    if not body.logprobs:
        return None
    return logprob_count("sample", "top_logprobs", body.top_logprobs or 0, config)


# Nearest effort that formats with channels support.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def _effort(body: ChatRequest, output_format: OutputFormat) -> dict[str, Any]:
    """Return the template variables for reasoning. Model families have two names for the switch."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    thinks = effort != "none"
    supported = _EFFORTS.get(effort, effort) if output_format.channels is not None else effort
    return {"reasoning_effort": supported, "enable_thinking": thinks, "thinking": thinks}


def _reply_role(body: ChatRequest, rendered: Rendered, compat: str) -> tuple[str, str]:
    """Return the role of the reply and the text that it repeats.

    vLLM returns the role of the continued message. Clients of OpenAI's API accept only `assistant`.
    """
    last = body.messages[-1]
    spoken = "assistant" if rendered.opens_turn else str(last["role"])
    role = spoken if compat == "vllm" else "assistant"
    return role, spoken_text(last) if body.echo and last["role"] == spoken else ""


def plan_chat(body: ChatRequest, served: Served) -> ChatPlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    text, config = served.text, served.config
    refuse_unsupported(body)
    top_logprobs = _top_logprobs(body, config)
    prompt_logprobs = logprob_count("prompt", "prompt_logprobs", body.prompt_logprobs, config)
    check_stream(body, prompt_logprobs)
    check_routes(body, config)
    use = tool_use(body, text.output_format.calls)
    language = asked_language(body)
    variables = _effort(body, text.output_format)
    rendered = render(body, text, config, variables)
    if body.truncate_prompt_tokens is None:
        check_text(rendered.text, text.tokenizer, config)
    switches = {**variables, **(body.chat_template_kwargs or {})}
    thinking = thinking_of(rendered.text, rendered.continues, text.output_format.reasoning, switches)
    reasoning = None if thinking.off else text.output_format.reasoning
    binds = language is not None or use.avoided is None  # text without calls does not constrain the reasoning
    thinks = (body.include_reasoning or not binds) and thinking.possible
    constraint = Constraint(
        text.special_id, reasoning if thinks else None, thinking.begun and thinks, text.output_format.channels
    )
    grammar = tool_grammar(use, language, constraint)
    output_format = OutputFormat(reasoning, use.calls, text.output_format.channels)
    limit = thinking_limit(body.thinking_token_budget, text.output_format, output_format, thinking, text.tokenizer)
    if grammar is not None and not thinks:
        limit = None  # the grammar does not allow reasoning
    short = body.max_completion_tokens is not None
    tokens = body.max_completion_tokens if short else body.max_tokens
    tokenized = tokenize(body, rendered, text, served.media)
    options = PromptOptions(
        tokens=config.sampling.max_tokens if tokens is None else tokens,
        tokens_param="max_completion_tokens" if short else "max_tokens",
        logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=named_tokens(body.logprob_token_ids, top_logprobs, config),
        grammar=grammar,
        thinking=limit,
        media=tokenized.media,
    )
    prompt = build_prompt(tokenized.ids, body, options, served, 0)
    shown = frozenset(token for marker in output_format.tokens() if (token := text.special_id(marker)) is not None)
    role, echo = _reply_role(body, rendered, config.endpoints.compat)
    return ChatPlan(
        prompts=(prompt,),
        reading=reading_of(body, served, shown),
        bound_by="tools" if language is None or use.mode in ("required", "named") else language.param,
        output_format=output_format,
        tools=use,
        reasons=thinking.begun and (thinks or grammar is None),
        role=role,
        echo=echo,
    )
