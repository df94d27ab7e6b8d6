"""Sharing of the context window between prompt and reply (docs/http.md, ER-06 to ER-11)."""

from collections.abc import Collection

from appliance.config.gateway import GatewayConfig
from appliance.server.schema.common import GenerationRequest
from engine.api.errors import RequestError
from engine.api.ranges import check_max_tokens
from engine.text import Tokenizer


def check_text(text: str, tokenizer: Tokenizer, config: GatewayConfig, tokens: int | None = None) -> None:
    """Reject a text, before tokenization, that has too many tokens for any tokenization.

    `tokens` is the limit, by default the context window. Tokenizers without a longest piece cannot be checked.
    """
    if tokenizer.longest_piece is None:
        return
    tokens = config.max_context if tokens is None else tokens
    most = tokens * tokenizer.longest_piece
    if len(text) > most:
        raise RequestError(
            f"This model's maximum context length is {tokens} tokens. However, your prompt has {len(text)} "
            f"characters, more than {most}, the most that this many tokens can hold. Please reduce the length of the "
            "input prompt.",
            "input_text",
        )


def check_ids(ids: list[int], config: GatewayConfig, *, param: str = "prompt") -> None:
    """Reject token IDs outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= config.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < config.vocab_size)
        raise RequestError(f"Token id {wrong} is out of vocabulary; ids are 0 to {config.vocab_size - 1}.", param)


def kept_tokens(keep: int | None, config: GatewayConfig) -> int | None:
    """Return a valid `truncate_prompt_tokens`: None, -1 (as much as fits) or a number of tokens."""
    if keep is not None and keep < -1:
        raise RequestError(f"truncate_prompt_tokens must be -1 or at least 0, got {keep}.", "truncate_prompt_tokens")
    if keep is not None and keep > config.max_context:
        raise RequestError(
            f"truncate_prompt_tokens value ({keep}) is greater than max_model_len ({config.max_context}). "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    return keep


def truncated(
    ids: list[int], request: GenerationRequest, asked_tokens: int | None, tokenizer: Tokenizer, config: GatewayConfig
) -> list[int]:
    """Return the prompt cut to `truncate_prompt_tokens`. -1 keeps as much as leaves room for the requested reply."""
    keep = kept_tokens(request.truncate_prompt_tokens, config)
    if keep is None:
        return ids
    if keep == -1 and config.encoder is not None:
        keep = config.encoder.max_input
    elif keep == -1:
        keep = max(1, config.max_context - max(1, asked_tokens or 1))
    side = request.truncation_side or tokenizer.truncation_side
    if config.encoder is not None:
        return _cut_between(ids, keep, side, tokenizer.special_ids)
    if side == "left":
        return ids[-keep:] if keep else []
    return ids[:keep]


def _cut_between(ids: list[int], keep: int, side: str, special: Collection[int]) -> list[int]:
    """Cut an encoder input in the middle: special tokens at its ends stay, and the text between them is shortened."""
    first = next((at for at, token in enumerate(ids) if token not in special), 0)
    last = next((at for at, token in enumerate(reversed(ids)) if token not in special), 0)
    if len(ids) <= keep or keep <= first + last:
        return ids[:keep]
    body, room = ids[first : len(ids) - last], keep - first - last
    return [*ids[:first], *(body[-room:] if side == "left" else body[:room]), *ids[len(ids) - last :]]


def check_length(prompt_tokens: int, window: int, *, param: str = "prompt") -> None:
    """Reject an empty prompt and one that does not fit a window of `window` tokens."""
    if prompt_tokens == 0:
        raise RequestError("The prompt has no tokens; at least one is required.", param)
    if prompt_tokens > window:
        raise RequestError(
            f"This model's maximum context length is {window} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            "length of the input prompt.",
            "input_tokens",
        )


def reply_tokens(prompt_tokens: int, asked: int | None, config: GatewayConfig, *, param: str = "max_tokens") -> int:
    """Return the maximum number of tokens of the reply. `asked` None fills the window."""
    window = config.max_context
    check_length(prompt_tokens, window)
    if prompt_tokens == window:
        raise RequestError(
            f"The prompt's {prompt_tokens} tokens plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {window}. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    return tokens_within(window - prompt_tokens, asked, config, param=param)


def tokens_within(room: int, asked: int | None, config: GatewayConfig, *, param: str = "max_tokens") -> int:
    """Return the maximum number of tokens within `room`. `asked` None fills it."""
    if asked is not None:
        check_max_tokens(asked, param)
    if asked is not None and asked > config.max_context:
        raise RequestError(f"{param}={asked} cannot be greater than max_model_len={config.max_context}.", param)
    limits = [room, asked, config.limits.max_output_tokens]
    return min(limit for limit in limits if limit is not None)
