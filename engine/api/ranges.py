"""Ranges of sampling parameters: the same checks and messages for HTTP requests and for `engine.Params`.

Each function raises RequestError with the parameter's name as `param`; names are the same in JSON and in Python.
"""

import math
from collections.abc import Sequence

from engine.api.errors import RequestError

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01  # below it, float32 softmax overflows and is greedy anyway
MIN_REPETITION, MAX_REPETITION = 1e-4, 1e4  # beyond them, scaled logits overflow float32
MAX_BIAS = 100.0


def check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise RequestError for a value that is not a number. True and False are not numbers. HTTP has its own schemas."""
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise RequestError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}.", name)


def effective_temperature(value: float) -> float:
    """Return the temperature to use: 0 for greedy sampling, else at least MIN_TEMPERATURE."""
    if not 0 <= value <= 2:
        raise RequestError(f"temperature must be in [0, 2], got {value}.", "temperature")
    return 0.0 if value < GREEDY_BELOW else max(value, MIN_TEMPERATURE)


def effective_top_k(value: int) -> int:
    """Return the top_k to use; 0 is off."""
    if value < -1:
        raise RequestError(f"top_k must be 0 (disable), or at least 1, got {value}.", "top_k")
    return max(value, 0)


def check_penalty(name: str, value: float) -> float:
    if not -2 <= value <= 2:
        raise RequestError(f"{name} must be in [-2, 2], got {value}.", name)
    return value


def check_truncation(top_p: float, min_p: float) -> None:
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    if not 0 <= min_p <= 1:
        raise RequestError(f"min_p must be in [0, 1], got {min_p}.", "min_p")


def check_repetition(value: float) -> None:
    name = "repetition_penalty"
    if not (value > 0 and math.isfinite(value)):
        raise RequestError(f"{name} must be greater than zero, got {value}.", name)
    if not MIN_REPETITION <= value <= MAX_REPETITION:
        raise RequestError(f"{name} must be between {MIN_REPETITION} and {MAX_REPETITION:.0f}, got {value}.", name)


def check_lengths(min_tokens: int, max_tokens: int) -> None:
    """Check min_tokens. max_tokens: maximum length of the reply."""
    if min_tokens < 0:
        raise RequestError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens")
    if min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        raise RequestError(message, "min_tokens")


def check_logprobs(name: str, count: int) -> None:
    if count < -1:
        raise RequestError(f"{name} must be non-negative or -1, got {count}.", name)


def check_max_tokens(value: int, name: str = "max_tokens") -> None:
    if value < 1:
        raise RequestError(f"{name} must be at least 1, got {value}.", name)


def check_seed(value: int) -> None:
    if not -(2**63) <= value < 2**63:
        raise RequestError(f"seed must be a signed 64-bit integer, got {value}.", "seed")


def check_stop(stops: Sequence[str]) -> None:
    if not all(stops):
        raise RequestError("stop cannot contain an empty string.", "stop")


def effective_bias(value: float) -> float:
    """Return the bias to use, clamped to ±MAX_BIAS."""
    return max(-MAX_BIAS, min(MAX_BIAS, value))
