"""Typed access to a checkpoint's config.json in a normalised form.

Hugging Face configurations exist in an old form (rope_theta and rope_scaling at the top level, torch_dtype) and a new
form (rope_parameters, flat or for each kind of layer, dtype), and may be nested in a text_config. `normalised` converts
both into one flat dict. `Config` reads keys with the required type. Missing keys get the defaults of the architecture,
which are those of its configuration class in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.api.errors import CheckpointError

MAX_SIZE = 2**31 - 1  # limit of every size: kernels use 32-bit sizes
MAX_LAYERS = 4096
MAX_EXPERTS = 262_144  # limit for all layers together; the largest models have 15,000
MAX_LABELS = 1_000_000
MAX_SHOWN = 200  # maximum length of a value in a message
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one flat dict: keys of a nested text_config override outer keys, except architectures."""
    flat = {key: value for key, value in config.items() if key != "text_config"}
    inner = config.get("text_config")
    if isinstance(inner, dict):
        flat |= {key: value for key, value in inner.items() if key != "architectures" or "architectures" not in config}
    if flat.get("dtype") is None and flat.get("torch_dtype") is not None:
        flat["dtype"] = flat["torch_dtype"]
    flat.pop("torch_dtype", None)
    return flat


def shown(value: Any) -> str:
    """Return a value of config.json for a message, truncated to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


@dataclass(frozen=True)
class Config:
    """Keys of a normalised configuration. An explicit null differs from a missing key: it means "none"."""

    values: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)  # key -> its name in this architecture's config.json

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Mapping[str, str] | None = None, /, **defaults: Any) -> "Config":
        """names: keys with another name in this architecture. Defaults have the usual names."""
        names, flat = names or {}, normalised(config)
        found = {key: flat[name] for key, name in names.items() if name in flat}
        return cls({**defaults, **flat, **found}, names)

    def name(self, key: str) -> str:
        """Return the key as config.json spells it."""
        return self.names.get(key, key)

    def whole(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self._known(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(
                f"config.json: {self.name(key)} is {shown(value)}; it must be a whole number of at least {least}"
            )
        if value > most:
            raise CheckpointError(f"config.json: {self.name(key)} is {value}; it must be at most {most:,}")
        return value

    def number(self, key: str) -> float:
        value = self._known(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {self.name(key)} is {shown(value)}; it must be a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {self.name(key)} is {value:g}; it must be a number greater than 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self.name(key)} is {shown(value)}; it must be true or false")
        return bool(value)

    def whole_or_none(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.whole(key)

    def number_or_none(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def activation(self, key: str = "hidden_act") -> str:
        value = self._known(key)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {self.name(key)} is {shown(value)}; supported are {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    @property
    def hidden(self) -> int:
        return self.whole("hidden_size")

    @property
    def intermediate_size(self) -> int:
        return self.whole("intermediate_size")

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers", most=MAX_LAYERS)

    @property
    def heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        kv_heads = self.whole_or_none("num_key_value_heads") or self.heads
        if self.heads % kv_heads:
            raise CheckpointError(
                f"config.json: {self.name('num_attention_heads')} is {self.heads} and "
                f"{self.name('num_key_value_heads')} {kv_heads}; "
                "the first must be a multiple of the second"
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        size = self.whole_or_none("head_dim") or self.hidden // self.heads
        if size < 1:
            raise CheckpointError(
                f"config.json: {self.name('hidden_size')} is {self.hidden} and {self.name('num_attention_heads')} "
                f"{self.heads}; a head must have at least one dimension"
            )
        return size

    def check_multiple(self, name: str, value: int, of: str, divisor: int) -> None:
        """Raise CheckpointError unless the value of key `name` is a multiple of the divisor, the value of key `of`."""
        if value % divisor:
            raise CheckpointError(
                f"config.json: {self.name(name)} is {value} and {self.name(of)} {divisor}; the first must be a "
                "multiple of the second"
            )

    def window(self, key: str = "sliding_window") -> int | None:
        """Return the attention window or chunk, or None if it is not smaller than the context."""
        size = self.whole_or_none(key)
        return None if size is None or size >= self.whole("max_position_embeddings") else size

    def layer_types(
        self, default: tuple[str, ...], allowed: tuple[str, ...] = ("full_attention", "sliding_attention")
    ) -> tuple[str, ...]:
        """Return the kind of each layer, one of `allowed`."""
        kinds = self.values.get("layer_types")
        kinds = tuple(kinds) if isinstance(kinds, list) else default
        kinds = tuple(kind if isinstance(kind, str) else shown(kind) for kind in kinds)
        strange = set(kinds) - set(allowed)
        if strange or len(kinds) != self.layers:
            raise CheckpointError(
                f"config.json: layer_types has {len(kinds)} entries {shown(sorted(set(kinds)))}; it must name "
                f"{' or '.join(allowed)} for each of the {self.layers} layers"
            )
        return kinds

    def experts(self) -> tuple[int, int]:
        """Return the number of experts and the number of experts per token. Newer exporters write num_local_experts for
        every architecture; it has precedence over num_experts, which may come from the defaults."""
        key = "num_experts" if self.values.get("num_local_experts") is None else "num_local_experts"
        count, chosen = self.whole(key, most=MAX_EXPERTS // self.layers), self.whole("num_experts_per_tok")
        if chosen > count:
            raise CheckpointError(
                f"config.json: num_experts_per_tok is {chosen}, but {key} is {count}; a token cannot take more experts "
                "than there are"
            )
        return count, chosen

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts, by Qwen's rule: every decoder_sparse_step-th layer except those
        in mlp_only_layers."""
        step, plain = self.whole("decoder_sparse_step"), self.values.get("mlp_only_layers") or []
        if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
            raise CheckpointError(
                f"config.json: mlp_only_layers is {shown(plain)}; it must be a list of layers' numbers"
            )
        return tuple(i not in plain and (i + 1) % step == 0 for i in range(self.layers))

    def _known(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise CheckpointError(f"config.json: {self.name(key)} is missing")
        return self.values[key]
