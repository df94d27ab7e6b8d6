"""Completions of an encoder-decoder model: the prompt is the encoder input, and the reply starts with decoder tokens.

`decoder_prompt` sets those tokens. Its text follows the decoder's first token and replaces tokens that the checkpoint
forces there, such as a language. Token IDs are used unchanged.
"""

from dataclasses import dataclass

from appliance.config.gateway import GatewayConfig, SourceModel
from appliance.server.chat.window import check_ids
from appliance.server.schema.completions import CompletionRequest
from engine.api.errors import RequestError
from engine.text import Tokenizer

NO_CONVERSATIONS = (
    "This model reads a text with its encoder and replies to it, and holds no conversations; use /v1/completions, with "
    "that text as prompt."
)


@dataclass(frozen=True)
class Beginning:
    """Decoder tokens with which a reply starts."""

    ids: tuple[int, ...] = ()
    given: int = 0  # number of tokens that the request provided


def beginning(body: CompletionRequest, config: GatewayConfig, tokenizer: Tokenizer) -> Beginning:
    """Return the decoder tokens at the start of the reply, none for a decoder-only model.

    Raise RequestError for fields that the model cannot use.
    """
    asked, sources = body.decoder_prompt, config.sources
    if sources is None:
        if asked is None:
            return Beginning()
        raise RequestError(
            "decoder_prompt is for models whose encoder reads the prompt, and this one continues it; leave it out, or "
            "put its text at the end of prompt.",
            "decoder_prompt",
        )
    _refuse(body)
    if asked is None:
        return Beginning(sources.begins)
    if isinstance(asked, str):
        ids = tuple(tokenizer.encode(asked, add_special_tokens=False))
        return Beginning((*sources.begins[:1], *ids), len(ids))
    check_ids(asked, config, param="decoder_prompt")
    return Beginning(tuple(asked), len(asked))


def _refuse(body: CompletionRequest) -> None:
    if body.echo:
        raise RequestError(
            "echo is not possible with this model: its reply does not go on with the prompt; leave it out.", "echo"
        )
    if body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not possible with this model: its encoder reads the prompt both ways, and predicts no "
            "token of it; leave it out.",
            "prompt_logprobs",
        )


def check_source(tokens: int, sources: SourceModel) -> None:
    """Raise RequestError for an empty prompt or one that is too long for the encoder."""
    if tokens == 0:
        raise RequestError("The prompt has no tokens; at least one is needed.", "prompt")
    if tokens > sources.longest:
        raise RequestError(
            f"This model's encoder reads at most {sources.longest} tokens. However, your prompt contains {tokens} "
            "input tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )


def reply_room(source: int, begin: Beginning, config: GatewayConfig, sources: SourceModel) -> int:
    """Return how many tokens a reply may have after its first decoder tokens.

    Raise RequestError if there is no room.
    """
    check_source(source, sources)
    room = min(sources.reply, config.max_context - source) - len(begin.ids)
    if room < 1:
        raise RequestError(
            f"The reply begins with {len(begin.ids)} tokens, which leave no room for a token of it: behind this prompt "
            f"it may have {room + len(begin.ids)} tokens in all. Please shorten decoder_prompt.",
            "decoder_prompt" if begin.given else "input_tokens",
        )
    return room
