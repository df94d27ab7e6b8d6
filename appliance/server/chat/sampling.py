"""Conversion of a request's sampling fields to the engine's `Sampling`: ranges are checked and defaults applied.

See docs/http.md, Sampling. Messages start as clients and tests of the reference engine expect; `param` is the field to
change.
"""

import secrets
from collections.abc import Iterable

from appliance.config.gateway import GatewayConfig
from appliance.server.schema.common import GenerationRequest, SamplingFields
from engine.api.errors import RequestError
from engine.api.messages import Sampling
from engine.api.ranges import (
    check_lengths,
    check_logprobs,
    check_penalty,
    check_repetition,
    check_stop,
    check_truncation,
    effective_bias,
    effective_temperature,
    effective_top_k,
)
from engine.text import Tokenizer

MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1024
MAX_LOGPROB_IDS = 128


def _refuse(param: str, message: str) -> RequestError:
    return RequestError(message, param)


def check_n(n: int, temperature: float, config: GatewayConfig) -> None:
    if n < 1:
        raise _refuse("n", f"n must be at least 1, got {n}.")
    if n > config.limits.max_choices:
        raise _refuse(
            "n", f"n must be at most {config.limits.max_choices}, got {n}; the server sets limits.max_choices."
        )
    if n > 1 and temperature == 0:
        raise _refuse("n", f"n must be 1 when using greedy sampling, got {n}.")


def logprob_count(kind: str, param: str, count: int | None, config: GatewayConfig) -> int | None:
    """Return a number of logprobs within limits.max_logprobs. -1 means the complete vocabulary."""
    if count is None:
        return None
    check_logprobs(param, count)
    asked = config.vocab_size if count == -1 else count
    if config.limits.max_logprobs != -1 and asked > config.limits.max_logprobs:
        most = config.limits.max_logprobs
        raise _refuse(param, f"Requested {kind} logprobs of {asked}, which is greater than max allowed: {most}")
    return -1 if asked >= config.vocab_size else asked


def _in_vocabulary(param: str, ids: Iterable[int], config: GatewayConfig) -> tuple[int, ...]:
    ids = tuple(ids)
    if wrong := [token for token in ids if not 0 <= token < config.vocab_size]:
        raise _refuse(
            param,
            f"token_id(s) {wrong[:10]} in {param} contain out-of-vocab token ids. Vocabulary size: {config.vocab_size}",
        )
    return ids


def _logit_bias(biases: dict[str, float] | None, config: GatewayConfig) -> dict[int, float]:
    if not biases:
        return {}
    if len(biases) > MAX_BIASES:
        raise _refuse("logit_bias", f"logit_bias has {len(biases)} entries; the limit is {MAX_BIASES}.")
    try:
        resolved = {int(key): effective_bias(value) for key, value in biases.items()}
    except ValueError:
        wrong = [key for key in biases if not key.strip().lstrip("+-").isdigit()]
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong[:10]}"
        raise _refuse("logit_bias", message) from None
    _in_vocabulary("logit_bias", resolved, config)
    return resolved


def _allowed_ids(ids: list[int] | None, config: GatewayConfig) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise _refuse("allowed_token_ids", "allowed_token_ids is not None and empty!")
    if len(ids) > MAX_ALLOWED_IDS:
        raise _refuse("allowed_token_ids", f"allowed_token_ids has {len(ids)} ids; the limit is {MAX_ALLOWED_IDS}.")
    return _in_vocabulary("allowed_token_ids", ids, config)


def named_tokens(ids: list[int] | None, logprobs: int | None, config: GatewayConfig) -> tuple[int, ...]:
    """Return the tokens whose logprobs are returned instead of the most likely ones."""
    if not ids:
        return ()
    if logprobs is None:
        raise _refuse("logprob_token_ids", "logprob_token_ids requires logprobs.")
    if len(ids) > MAX_LOGPROB_IDS:
        message = f"logprob_token_ids has {len(ids)} ids; the limit is {MAX_LOGPROB_IDS}."
        raise _refuse("logprob_token_ids", message)
    return _in_vocabulary("logprob_token_ids", ids, config)


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text and after a space."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise _refuse("bad_words", f"bad_words has {len(words)} words; the limit is {MAX_BAD_WORDS}.")
    if not all(words):
        raise _refuse("bad_words", "bad_words cannot contain an empty string.")
    spelled = (prefix + word.lstrip() for word in words for prefix in ("", " "))
    tokens = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spelled)
    sequences = tuple(dict.fromkeys(ids for ids in tokens if ids))
    if (count := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:
        raise _refuse("bad_words", f"bad_words have {count} tokens in total; the limit is {MAX_BAD_WORD_TOKENS}.")
    return sequences


def stop_strings(stop: str | list[str] | None, config: GatewayConfig) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check_stop(stops)
    if len(stops) > config.limits.max_stop:
        raise _refuse(
            "stop", f"stop has {len(stops)} strings; the server's limits.max_stop allows {config.limits.max_stop}."
        )
    return stops


def stop_ids(request: SamplingFields, config: GatewayConfig) -> tuple[int, ...]:
    return _in_vocabulary("stop_token_ids", request.stop_token_ids or (), config)


def child_seeds(seed: int | None, count: int) -> list[int]:
    """Return the seeds of the choices: seed + i as signed 64 bit, with a random base for None or -1."""
    base = secrets.randbits(63) if seed is None or seed == -1 else seed
    return [(base + index + 2**63) % 2**64 - 2**63 for index in range(count)]


def resolve(
    request: SamplingFields,
    config: GatewayConfig,
    tokenizer: Tokenizer,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    logprob_ids: tuple[int, ...] = (),
    max_tokens: int,
    asked_tokens: int | None,
) -> Sampling:
    """Return the request's sampling parameters except the seed.

    `max_tokens` is the part of `asked_tokens` that fits the window. Raise RequestError for the first value out of
    range.
    """
    defaults = config.sampling

    def chosen(value: float | None, default: float) -> float:
        return default if value is None else value

    temperature = effective_temperature(chosen(request.temperature, defaults.temperature))
    top_p = chosen(request.top_p, defaults.top_p)
    min_p = chosen(request.min_p, defaults.min_p)
    repetition = chosen(request.repetition_penalty, defaults.repetition_penalty)
    top_k = effective_top_k(defaults.top_k if request.top_k is None else request.top_k)
    check_truncation(top_p, min_p)
    check_repetition(repetition)
    check_lengths(request.min_tokens, asked_tokens or max_tokens)
    presence = chosen(request.presence_penalty, defaults.presence_penalty)
    frequency = chosen(request.frequency_penalty, defaults.frequency_penalty)
    greedy = temperature == 0
    return Sampling(
        temperature=temperature,
        top_k=0 if greedy else top_k,
        top_p=1.0 if greedy else top_p,
        min_p=0.0 if greedy else min_p,
        presence_penalty=check_penalty("presence_penalty", presence),
        frequency_penalty=check_penalty("frequency_penalty", frequency),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request.logit_bias, config),
        allowed_token_ids=_allowed_ids(request.allowed_token_ids, config),
        bad_words=(
            *_bad_words(request.bad_words, tokenizer),
            *(() if config.encoder is None else config.encoder.banned),
        ),
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=logprob_ids,
        return_routed_experts=isinstance(request, GenerationRequest) and bool(request.return_routed_experts),
    )
