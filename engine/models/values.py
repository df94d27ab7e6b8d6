"""Check that numbers of a declared model are finite, positive or in order where the arithmetic requires it.

A checkpoint with, for example, epsilon -1 or a YaRN factor of 0 loads and then computes NaN for every request.
`check_values` finds such values before anything starts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.parts import (
    Attention,
    DeltaNet,
    DynamicScaling,
    KimiDelta,
    LatentAttention,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Mamba2,
    Model,
    Parallel,
    ProportionalScaling,
    RMSNorm,
    Rope,
    YarnScaling,
)

Test = Callable[[Any], bool]

_POSITIVE: tuple[str, Test] = ("greater than 0", lambda value: value > 0)
_NOT_NEGATIVE: tuple[str, Test] = ("0 or greater", lambda value: value >= 0)
_ALL_POSITIVE: tuple[str, Test] = (
    "numbers greater than 0",
    lambda values: all(0 < value < math.inf for value in values),
)

RULES: dict[type, dict[str, tuple[str, str, Test]]] = {
    RMSNorm: {"eps": ("rms_norm_eps (epsilon of the norms)", *_NOT_NEGATIVE)},
    LayerNorm: {"eps": ("layer_norm_eps (epsilon of the norms)", *_NOT_NEGATIVE)},
    Rope: {"theta": ("rope_theta", *_POSITIVE)},
    LinearScaling: {"factor": ("factor of the linear RoPE scaling", *_POSITIVE)},
    ProportionalScaling: {"factor": ("factor of the proportional RoPE scaling", *_POSITIVE)},
    DynamicScaling: {
        "factor": ("factor of the dynamic RoPE scaling", *_POSITIVE),
        "original": ("max_position_embeddings", *_POSITIVE),
    },
    Llama3Scaling: {
        "factor": ("factor of the llama3 RoPE scaling", *_POSITIVE),
        "low_freq": ("low_freq_factor of the llama3 RoPE scaling", *_POSITIVE),
        "high_freq": ("high_freq_factor of the llama3 RoPE scaling", *_POSITIVE),
        "original": ("original_max_position_embeddings", *_POSITIVE),
    },
    YarnScaling: {
        "factor": ("factor of the YaRN RoPE scaling", *_POSITIVE),
        "original": ("original_max_position_embeddings", *_POSITIVE),
        "beta_fast": ("beta_fast of the YaRN RoPE scaling", *_POSITIVE),
        "beta_slow": ("beta_slow of the YaRN RoPE scaling", *_POSITIVE),
        "attention": ("attention_factor of the YaRN RoPE scaling", *_POSITIVE),
    },
    LongScaling: {
        "short": ("short_factor of the longrope RoPE scaling", *_ALL_POSITIVE),
        "long": ("long_factor of the longrope RoPE scaling", *_ALL_POSITIVE),
        "original": ("original_max_position_embeddings", *_POSITIVE),
        "attention": ("attention_factor of the longrope RoPE scaling", *_POSITIVE),
    },
    DeltaNet: {"eps": ("rms_norm_eps (epsilon of the norms)", *_NOT_NEGATIVE)},
    KimiDelta: {"eps": ("rms_norm_eps (epsilon of the norms)", *_NOT_NEGATIVE)},
    Mamba2: {"eps": ("layer_norm_epsilon (epsilon of the norms)", *_NOT_NEGATIVE)},
    Parallel: {"scales": ("multipliers of the outputs of mixer and attention", *_ALL_POSITIVE)},
    Attention: {"scale": ("scale of the attention scores", *_POSITIVE)},
    LatentAttention: {"scale": ("scale of the attention scores", *_POSITIVE)},
}
"""Field of a part -> its key in config.json, the allowed values as text, and the test. None is not tested."""


def check_values(model: Model, place: str) -> None:
    """Raise CheckpointError for a number out of range. `place`: the file that declares the model."""
    for part in _parts(model):
        for name, (key, allowed, test) in RULES.get(type(part), {}).items():
            value = getattr(part, name)
            if value is not None and not test(value):
                raise CheckpointError(f"{place}: {key} is {value!r}; it must be {allowed}")
        for name, value in ((field.name, getattr(part, field.name)) for field in fields(part)):
            if isinstance(value, float) and not math.isfinite(value):
                key = RULES.get(type(part), {}).get(name, (name,))[0]
                raise CheckpointError(f"{place}: {key} is {value!r}; it must be a finite number")
        if isinstance(part, Llama3Scaling) and part.high_freq <= part.low_freq:
            raise CheckpointError(
                f"{place}: high_freq_factor is {part.high_freq:g} and low_freq_factor {part.low_freq:g}; "
                "the first must be greater"
            )


def _parts(value: Any) -> Iterator[Any]:
    """Yield every distinct dataclass in a declaration."""
    seen, waiting = set(), [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, tuple):
            waiting.extend(one)
        elif is_dataclass(one) and one not in seen:
            seen.add(one)
            yield one
            waiting.extend(getattr(one, field.name) for field in fields(one))
