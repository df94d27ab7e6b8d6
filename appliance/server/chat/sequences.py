"""Conversion of prompt token IDs to `Submit`s, which have all inputs of the engine."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from appliance.config.gateway import GatewayConfig
from appliance.server.chat.encoder_input import DecoderStart, max_reply_tokens
from appliance.server.chat.parsed import Prompt, Reading, Served
from appliance.server.chat.sampling import check_n, child_seeds, resolve, stop_ids, stop_strings
from appliance.server.chat.thinking import check_close
from appliance.server.chat.window import check_ids, reply_tokens, tokens_within, truncated
from appliance.server.schema.common import GenerationRequest
from engine.api.errors import RequestError
from engine.api.media import MediaItem
from engine.api.messages import Grammar, Sampling, Submit, Thinking

MAX_SALT = 128
MAX_MEDIA = 512 << 20
"""Maximum bytes of the processed images of a request, times its choices: each choice sends them to an engine."""


def refuse_unsupported(body: GenerationRequest) -> None:
    if body.use_beam_search and body.stream:
        raise RequestError("Streaming is not currently supported with beam search", "stream")
    options = {
        "use_beam_search": body.use_beam_search,
        "repetition_detection": body.repetition_detection,
    }
    for name, value in options.items():
        if value:
            raise RequestError(f"{name} is not supported by this server; leave it out.", name)


def check_routes(body: GenerationRequest, config: GatewayConfig) -> None:
    """Raise RequestError for experts that the engines do not return."""
    if body.return_routed_experts and not config.routed_experts:
        raise RequestError(
            "return_routed_experts requires a model with experts and engine.return_routed_experts: true in the "
            "manifest; leave it out.",
            "return_routed_experts",
        )


def check_stream(body: GenerationRequest, prompt_logprobs: int | None) -> None:
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
class PromptOptions:
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
    media: tuple[MediaItem, ...] = ()


def build_prompt(ids: list[int], body: GenerationRequest, options: PromptOptions, served: Served, first: int) -> Prompt:
    """Return one prompt with its choices. `first` is the index of the first choice in the reply."""
    config, tokenizer = served.config, served.text.tokenizer
    tokens = 1 if options.scores_only else options.tokens
    kept = truncated(ids, body, tokens, tokenizer, config)
    if options.media and len(kept) != len(ids):
        raise RequestError("A prompt with images, videos or audio cannot be truncated.", "truncate_prompt_tokens")
    ids = kept
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
    check_media(options.media, n)
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


def check_media(media: Iterable[MediaItem], n: int = 1, param: str = "messages") -> None:
    """Raise RequestError if the media of all sequences are too large. n: sequences that have them."""
    size = sum(len(tensor.data) for item in media for tensor in item.tensors.values())
    if size * n > MAX_MEDIA:
        choices, smaller = (f", for each of {n} choices", ", or use a smaller n") if n > 1 else ("", "")
        raise RequestError(
            f"The media of the request have {size:,} bytes after processing{choices}; the limit is {MAX_MEDIA:,} "
            f"together. Send fewer or smaller items{smaller}.",
            "n" if n > 1 else param,
        )


def _submit(
    name: str,
    ids: list[int],
    body: GenerationRequest,
    options: PromptOptions,
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
        adapter=served.adapter,
        media=options.media,
    )


def _eos_token_ids(served: Served) -> tuple[int, ...]:
    own = served.text.tokenizer.eos_id
    return served.config.eos_token_ids or (() if own is None else (own,))


def reading_of(body: GenerationRequest, served: Served, shown: frozenset[int] = frozenset()) -> Reading:
    ends = () if body.ignore_eos else _eos_token_ids(served)
    return Reading(
        stops=stop_strings(body.stop, served.config),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        end_ids=frozenset((*ends, *stop_ids(body, served.config))),
        shown_ids=shown,
    )
