"""Completions of an encoder-decoder model: the prompt is the encoder input, and the reply starts with decoder tokens.

`decoder_prompt` sets those tokens. Its text follows the decoder's first token and replaces tokens that the checkpoint
forces there, such as a language. Token IDs are used unchanged.
"""

from dataclasses import dataclass

from appliance.config.gateway import EncoderLimits, GatewayConfig
from appliance.server.chat.window import check_ids
from appliance.server.schema.completions import CompletionRequest
from engine.api.errors import RequestError
from engine.text import Tokenizer

NO_CONVERSATIONS = (
    "This is an encoder-decoder model, which does not support chat messages. Use /v1/completions with the text as "
    "`prompt`."
)


@dataclass(frozen=True)
class DecoderStart:
    """Decoder tokens with which a reply starts."""

    ids: tuple[int, ...] = ()
    given: int = 0  # number of tokens that the request provided


def resolve_decoder_start(body: CompletionRequest, config: GatewayConfig, tokenizer: Tokenizer) -> DecoderStart:
    """Return the decoder tokens at the start of the reply, none for a decoder-only model.

    Raise RequestError for fields that the model cannot use.
    """
    asked, encoder = body.decoder_prompt, config.encoder
    if encoder is None:
        if asked is None:
            return DecoderStart()
        raise RequestError(
            "decoder_prompt is only possible with encoder-decoder models. Leave it out, or append its text to prompt.",
            "decoder_prompt",
        )
    _refuse(body)
    if asked is None:
        return DecoderStart(encoder.decoder_start_ids)
    if isinstance(asked, str):
        ids = tuple(tokenizer.encode(asked, add_special_tokens=False))
        return DecoderStart((*encoder.decoder_start_ids[:1], *ids), len(ids))
    check_ids(asked, config, param="decoder_prompt")
    return DecoderStart(tuple(asked), len(asked))


def _refuse(body: CompletionRequest) -> None:
    if body.echo:
        raise RequestError(
            "echo is not possible with an encoder-decoder model, whose reply does not continue the prompt. Leave it "
            "out.",
            "echo",
        )
    if body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is not available for encoder-decoder models, which do not predict prompt tokens. Leave "
            "it out.",
            "prompt_logprobs",
        )


def check_encoder_input(tokens: int, encoder: EncoderLimits) -> None:
    """Raise RequestError for an empty prompt or one that is too long for the encoder."""
    if tokens == 0:
        raise RequestError("The prompt has no tokens; at least one is required.", "prompt")
    if tokens > encoder.max_input:
        raise RequestError(
            f"This model's encoder reads at most {encoder.max_input} tokens. However, your prompt contains {tokens} "
            "input tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )


def max_reply_tokens(source: int, decoder_start: DecoderStart, config: GatewayConfig, encoder: EncoderLimits) -> int:
    """Return how many tokens a reply may have after its first decoder tokens.

    Raise RequestError if there is no room.
    """
    check_encoder_input(source, encoder)
    limit, given = min(encoder.reply, config.max_context - source), len(decoder_start.ids)
    room = limit - given
    if room < 1:
        raise RequestError(
            f"The reply starts with {given} decoder tokens and may have at most {limit} tokens after this prompt, so "
            "no token can be generated. Shorten decoder_prompt or the prompt.",
            "decoder_prompt" if decoder_start.given else "input_tokens",
        )
    return room
