"""Read the RoPE settings of a configuration, in any of their forms, as a `Rope`.

Meaning, default and precedence of each key are those of transformers' modeling_rope_utils.py. A scaling is
`rope_scaling` (old) or the rest of `rope_parameters` (new); its kind is `rope_type` or, older, `type`.
"""

import math
from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.parts import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)


def rope(
    c: Config,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    kind: str | None = None,
    ntk_alpha: bool = False,
) -> Rope:
    """Return the RoPE of layers of this kind ("full_attention", "sliding_attention"; None: all layers share one).
    `theta` and `partial` are the architecture's defaults. ntk_alpha: dynamic scaling with the key `alpha` is instead
    the fixed base theta · alpha^(dim / (dim - 2))."""
    parameters = _parameters(c, kind)
    base = _number(parameters, "rope_theta", _number(c.values, "rope_theta", theta))
    share = _number(parameters, "partial_rotary_factor", _number(c.values, "partial_rotary_factor", partial))
    if _kind(parameters) == "proportional":
        return Rope(dim=c.head_dim, theta=base, interleaved=interleaved, scaling=_proportional(c, parameters, share))
    dim = int(c.head_dim * share) if 0 < share <= 1 else 0
    if dim < 2 or dim % 2:
        raise CheckpointError(
            f"config.json: head_dim {c.head_dim} with partial_rotary_factor {share} gives {dim} rotated dimensions; "
            "rotary positions need an even number of at least 2"
        )
    if ntk_alpha and _kind(parameters) == "dynamic" and parameters.get("alpha"):
        alpha = _number(parameters, "alpha")
        if not 0 < alpha < 1e9 or dim < 4:
            raise CheckpointError(
                f"config.json: alpha of the rotary settings is {alpha:g} for {dim} rotated dimensions; it must be "
                "greater than 0 and less than 1e9, for at least 4 dimensions"
            )
        return Rope(dim=dim, theta=base * alpha ** (dim / (dim - 2)), interleaved=interleaved)
    return Rope(dim=dim, theta=base, interleaved=interleaved, scaling=_scaling(c, parameters, dim))


def local_rope(c: Config, *, theta: float = 10_000.0) -> Rope:
    """Return the unscaled RoPE of Gemma 3's windowed layers. Its base is rope_local_base_freq in old files."""
    parameters = c.values.get("rope_parameters") or {}
    if isinstance(parameters.get("sliding_attention"), dict):
        return rope(c, theta=_number(c.values, "rope_local_base_freq", theta), kind="sliding_attention")
    return Rope(dim=c.head_dim, theta=_number(c.values, "rope_local_base_freq", theta))


def claimed_context(c: Config, rope: Rope | None) -> int:
    """Return the longest sequence that the configuration claims to support. Linear, dynamic and yarn scaling extend the
    trained length by `factor`; for other kinds, max_position_embeddings is already the extended length."""
    trained = c.whole("max_position_embeddings")
    match None if rope is None else rope.scaling:
        case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
            return int(trained * factor)
        case YarnScaling(factor=factor, original=original):
            return max(trained, int(original * factor))
        case _:
            return trained


def yarn_mscale(c: Config) -> float:
    """Return the factor of queries and keys that DeepSeek's mscale_all_dim defines for every scaling of RoPE, or 1."""
    parameters = _parameters(c, None)
    multiplier = _number(parameters, "mscale_all_dim", 0.0)
    if _kind(parameters) == "default" or not multiplier:
        return 1.0
    return _mscale(_number(parameters, "factor"), multiplier)


def _mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _parameters(c: Config, kind: str | None) -> Mapping[str, Any]:
    """Return the flat settings for layers of this kind. rope_scaling overrides rope_parameters."""
    new, old = c.values.get("rope_parameters") or {}, c.values.get("rope_scaling") or {}
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be an object")
    nested = {name: value for name, value in new.items() if isinstance(value, dict)}
    if kind is not None and kind in nested:
        return {**nested[kind], **old}
    if nested:
        if any(value != next(iter(nested.values())) for value in nested.values()):
            raise CheckpointError(
                f"config.json: rope_parameters differs between {' and '.join(nested)}, "
                "which this architecture does not support"
            )
        return {**next(iter(nested.values())), **old}
    return {**new, **old}


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        state = "is missing" if value is None else f"is {value!r}; it must be a number"
        raise CheckpointError(f"config.json: {key} of the rotary settings {state}")
    return float(value)


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _scaling(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling | None:
    kind = _kind(parameters)
    # Early Phi-3 configurations name longrope "su" or even "yarn"; it is identified by its lists of factors.
    if kind == "su" or "short_factor" in parameters:
        kind = "longrope"
    if kind == "default":
        return None
    if kind not in _KINDS:
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not supported; supported are default, {', '.join(_KINDS)}"
        )
    return _KINDS[kind](c, parameters, dim)


def _original(c: Config, parameters: Mapping[str, Any]) -> int:
    """Return the trained length. A key at the top level (Phi-3) overrides one in the RoPE settings."""
    key = "original_max_position_embeddings"
    value = int(_number(c.values, key, _number(parameters, key, c.whole("max_position_embeddings"))))
    if value <= 0:
        raise CheckpointError(f"config.json: {key} is {value}; it must be greater than 0")
    return value


def _proportional(c: Config, parameters: Mapping[str, Any], share: float) -> Scaling:
    pairs = int(share * c.head_dim // 2) if 0 < share <= 1 else 0
    if pairs < 1 or c.head_dim % 2:
        raise CheckpointError(
            f"config.json: a head of {c.head_dim} dimensions with partial_rotary_factor {share:g} has {pairs} rotated "
            "pairs; proportional rotary positions need at least one, and an even number of dimensions"
        )
    return ProportionalScaling(pairs=pairs, factor=_number(parameters, "factor", 1.0))


def _linear(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling:
    return LinearScaling(factor=_number(parameters, "factor"))


def _dynamic(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling:
    return DynamicScaling(factor=_number(parameters, "factor"), original=c.whole("max_position_embeddings"))


def _llama3(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling:
    return Llama3Scaling(
        factor=_number(parameters, "factor"),
        low_freq=_number(parameters, "low_freq_factor"),
        high_freq=_number(parameters, "high_freq_factor"),
        original=_original(c, parameters),
    )


def _yarn(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling:
    original = _original(c, parameters)
    factor = _number(parameters, "factor", c.whole("max_position_embeddings") / original)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        default = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    else:
        default = _mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        attention=_number(parameters, "attention_factor", default),
        truncate=parameters.get("truncate", True),
    )


def _long(c: Config, parameters: Mapping[str, Any], dim: int) -> Scaling:
    original = _original(c, parameters)
    factor = _number(parameters, "factor", c.whole("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {}
    for key in ("short_factor", "long_factor"):
        values = parameters.get(key)
        if not isinstance(values, list) or len(values) != dim // 2:
            raise CheckpointError(
                f"config.json: {key} must be a list of {dim // 2} numbers, half the rotated dimensions"
            )
        factors[key] = tuple(float(value) for value in values)
    return LongScaling(
        short=factors["short_factor"],
        long=factors["long_factor"],
        original=original,
        attention=_number(parameters, "attention_factor", default),
    )


_KINDS = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _long}
