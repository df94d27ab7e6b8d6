"""Conversion of a validated body to `Submit`s, without I/O.

This module determines all engine inputs and how the generated tokens are decoded.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.config.gateway import GatewayConfig
from appliance.output_formats.constraint import Constraint
from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.formats import PLAIN
from appliance.server.chat.conversation import Rendered, Text, conversation_ids, render
from appliance.server.chat.deadlines import Deadlines
from appliance.server.chat.encoder_input import DecoderStart, max_reply_tokens, resolve_decoder_start
from appliance.server.chat.language import asked_language
from appliance.server.chat.messages import template_messages
from appliance.server.chat.sampling import (
    check_n,
    child_seeds,
    logprob_count,
    named_tokens,
    resolve,
    stop_ids,
    stop_strings,
)
from appliance.server.chat.thinking import check_close, thinking_limit, thinking_of
from appliance.server.chat.tools import ToolUse, tool_grammar, tool_use
from appliance.server.chat.window import check_ids, check_text, reply_tokens, tokens_within, truncated
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.common import GenerationRequest
from appliance.server.schema.completions import CompletionRequest
from engine.api.errors import RequestError
from engine.api.messages import Grammar, Sampling, Submit, Thinking

MAX_SALT = 128


@dataclass(frozen=True)
class Served:
    """Context in which one request is parsed."""

    text: Text
    config: GatewayConfig
    request_id: str
    salt: str | None = None  # from a header, for gateways that cannot change bodies
    priority: int | None = None  # from a header
    owner: str = ""  # name for its API key
    share: float = 1.0
    deadlines: Deadlines = Deadlines()  # from headers
    arrived_s: float = 0.0  # monotonic time from which deadlines count
    may_hurry: bool = True
    """The API key may use a priority below 0."""

    def resolved_priority(self, given: int) -> int:
        """Return the priority of the body or of the headers. Raise RequestError if the API key may not use it."""
        priority = given or self.priority or 0
        if priority < 0 and not self.may_hurry:
            raise RequestError(
                f"priority {priority} is below 0, which this API key is not allowed to use. Use 0 or "
                "more, or ask the operator to set priority=yes for the key.",
                "priority",
            )
        return priority


@dataclass(frozen=True)
class Reading:
    """Options for decoding the tokens of one reply."""

    stops: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    skip_special_tokens: bool
    end_ids: frozenset[int] = frozenset()  # tokens that end the reply and are not part of its text
    shown_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Prompt:
    """One prompt and its choices."""

    ids: tuple[int, ...]
    submits: tuple[Submit, ...]
    drops_reply: bool = False  # only the prompt is scored; the one token that this requires is hidden
    decoder_start: DecoderStart | None = None  # first decoder tokens of an encoder-decoder model

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens before the reply."""
        return self.ids if self.decoder_start is None else self.decoder_start.ids

    @property
    def tokens(self) -> int:
        """Number of tokens that the request provided."""
        return len(self.ids) + (0 if self.decoder_start is None else self.decoder_start.given)


@dataclass(frozen=True)
class Plan:
    """A parsed request: its prompts in order, each with n choices."""

    prompts: tuple[Prompt, ...]
    reading: Reading
    bound_by: str = ""  # request field that the grammar of all choices comes from, or ""

    @property
    def submits(self) -> tuple[Submit, ...]:
        return tuple(submit for prompt in self.prompts for submit in prompt.submits)

    @property
    def grammar(self) -> Grammar | None:
        return self.prompts[0].submits[0].grammar


@dataclass(frozen=True)
class ChatPlan(Plan):
    """A parsed chat request and how its reply is decoded."""

    output_format: OutputFormat = PLAIN
    tools: ToolUse = ToolUse("none")
    reasons: bool = False  # the prompt has already opened the reasoning
    role: str = "assistant"
    echo: str = ""  # text that is repeated before the reply


def _refuse_unsupported(body: GenerationRequest) -> None:
    if body.use_beam_search and body.stream:
        raise RequestError("Streaming is not currently supported with beam search", "stream")
    options = {
        "use_beam_search": body.use_beam_search,
        "repetition_detection": body.repetition_detection,
    }
    for name, value in options.items():
        if value:
            raise RequestError(f"{name} is not supported by this server; leave it out.", name)


def _check_stream(body: GenerationRequest, prompt_logprobs: int | None) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options can only be set when stream is true.", "stream_options")
    if body.stream and prompt_logprobs:
        raise RequestError("prompt_logprobs are not available when stream=True", "prompt_logprobs")


def cache_salt(given: str | None, header: str | None) -> str:
    """Return the cache salt of the body or of the headers. Raise RequestError for an invalid one."""
    salt = header if given is None else given
    if salt is None:
        return ""
    if not salt or len(salt) > MAX_SALT or any(character in salt for character in "@/\\\0"):
        message = f"cache_salt must have 1 to {MAX_SALT} characters and none of @ / \\ and NUL."
        raise RequestError(message, "cache_salt")
    return salt


@dataclass(frozen=True)
class _PromptOptions:
    """Lengths and logprobs of one request, independent of the field names of its route."""

    tokens: int | None
    tokens_param: str
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    scores_only: bool = False
    thinking: Thinking | None = None
    decoder_start: DecoderStart = DecoderStart()


def _prompt(ids: list[int], body: GenerationRequest, options: _PromptOptions, served: Served, first: int) -> Prompt:
    """Return one prompt with its choices. `first` is the index of the first choice in the reply."""
    config, tokenizer = served.config, served.text.tokenizer
    tokens = 1 if options.scores_only else options.tokens
    ids = truncated(ids, body, tokens, tokenizer, config)
    check_ids(ids, config)
    if config.encoder is None:
        max_tokens = reply_tokens(len(ids), tokens, config, param=options.tokens_param)
    else:
        room = max_reply_tokens(len(ids), options.decoder_start, config, config.encoder)
        max_tokens = tokens_within(room, tokens, config, param=options.tokens_param)
    sampling = resolve(
        body,
        config,
        tokenizer,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        logprob_ids=options.logprob_ids,
        max_tokens=max_tokens,
        asked_tokens=tokens,
    )
    check_close(options.thinking, sampling)
    n = 1 if body.n is None else body.n
    check_n(n, sampling.temperature, config)
    seeds = child_seeds(body.seed, n)
    submits = tuple(
        _submit(
            f"{served.request_id}-{first + index}",
            ids,
            body,
            options,
            served,
            msgspec.structs.replace(sampling, seed=seed),
            max_tokens,
        )
        for index, seed in enumerate(seeds)
    )
    return Prompt(tuple(ids), submits, options.scores_only, None if config.encoder is None else options.decoder_start)


def _submit(
    name: str,
    ids: list[int],
    body: GenerationRequest,
    options: _PromptOptions,
    served: Served,
    sampling: Sampling,
    max_tokens: int,
) -> Submit:
    ttft_deadline, deadline = served.deadlines.resolve(body, served.arrived_s)
    return Submit(
        id=name,
        prompt=(*ids, *options.decoder_start.ids),
        sampling=sampling,
        max_tokens=max_tokens,
        eos_token_ids=_eos_token_ids(served),
        stop_token_ids=stop_ids(body, served.config),
        ignore_eos=body.ignore_eos,
        priority=served.resolved_priority(body.priority),
        salt=cache_salt(body.cache_salt, served.salt),
        grammar=options.grammar,
        thinking=options.thinking,
        owner=served.owner,
        share=served.share,
        ttft_deadline=ttft_deadline,
        deadline=deadline,
        source=len(ids) if served.config.encoder is not None else 0,
    )


def _eos_token_ids(served: Served) -> tuple[int, ...]:
    own = served.text.tokenizer.eos_id
    return served.config.eos_token_ids or (() if own is None else (own,))


def _reading(body: GenerationRequest, served: Served, shown: frozenset[int] = frozenset()) -> Reading:
    ends = () if body.ignore_eos else _eos_token_ids(served)
    return Reading(
        stops=stop_strings(body.stop, served.config),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        end_ids=frozenset((*ends, *stop_ids(body, served.config))),
        shown_ids=shown,
    )


# Completions


def _texts_or_ids(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def plan_completion(body: CompletionRequest, served: Served) -> Plan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    config, tokenizer = served.config, served.text.tokenizer
    _refuse_unsupported(body)
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
    if len(prompts) > config.max_prompts:
        message = f"prompt has {len(prompts)} entries; the server's limits.max_prompts allows {config.max_prompts}."
        raise RequestError(message, "prompt")
    logprobs = logprob_count("sample", "logprobs", body.logprobs, config)
    prompt_logprobs = logprob_count("prompt", "prompt_logprobs", body.prompt_logprobs, config)
    _check_stream(body, prompt_logprobs)
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
    options = _PromptOptions(
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
        planned.append(_prompt(prompt, body, options, served, at * n))
    return Plan(tuple(planned), _reading(body, served), "" if language is None else language.param)


# Chat


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
    content = template_messages([last], "")[0].get("content", "")
    role = spoken if compat == "vllm" else "assistant"
    return role, str(content) if body.echo and last["role"] == spoken else ""


def plan_chat(body: ChatRequest, served: Served) -> ChatPlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    text, config = served.text, served.config
    _refuse_unsupported(body)
    top_logprobs = _top_logprobs(body, config)
    prompt_logprobs = logprob_count("prompt", "prompt_logprobs", body.prompt_logprobs, config)
    _check_stream(body, prompt_logprobs)
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
    options = _PromptOptions(
        tokens=config.sampling.max_tokens if tokens is None else tokens,
        tokens_param="max_completion_tokens" if short else "max_tokens",
        logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=named_tokens(body.logprob_token_ids, top_logprobs, config),
        grammar=grammar,
        thinking=limit,
    )
    prompt = _prompt(conversation_ids(body, rendered, text), body, options, served, 0)
    shown = frozenset(token for marker in output_format.tokens() if (token := text.special_id(marker)) is not None)
    role, echo = _reply_role(body, rendered, config.compat)
    return ChatPlan(
        prompts=(prompt,),
        reading=_reading(body, served, shown),
        bound_by="tools" if language is None or use.mode in ("required", "named") else language.param,
        output_format=output_format,
        tools=use,
        reasons=thinking.begun and (thinks or grammar is None),
        role=role,
        echo=echo,
    )
