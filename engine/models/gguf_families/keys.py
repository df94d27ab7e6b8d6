"""Keys of GGUF files, and the settings that most kinds of files state in the same keys."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.api.errors import CheckpointError
from engine.gguf.file import GgufFile, GgufTensor
from engine.models.config import MAX_LAYERS

POSITIONS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Scaling factors of RoPE: of llama3, and of longrope. config.json also has them."""
MAX_FACTOR_BYTES = 1 << 16
_RECURRENT_CONTEXT = 131_072  # the converter writes 2**20 for models without a longest sequence
Settings = dict[str, Any]


@dataclass(frozen=True)
class Keys:
    """The keys of one file, without the name of the architecture in front."""

    file: GgufFile
    kind: str

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; a list of equal values is one value."""
        found = self.file.keys.get(f"{self.kind}.{key}", default)
        return found[0] if isinstance(found, tuple) and len(set(found)) == 1 else found

    def positive(self, key: str, default: float | None = None) -> Any:
        """Return a number above 0. Raises CheckpointError if it is missing without a default."""
        name = f"{self.kind}.{key}"
        found = self.file.require(name) if default is None else self.file.keys.get(name, default)
        if isinstance(found, tuple) and len(set(found)) == 1:
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise CheckpointError(f"{self.file.path}: {name} is {found!r}; it must be a number above 0")
        if found == math.inf:
            raise CheckpointError(f"{self.file.path}: {name} is inf; it must be finite")
        return found

    def largest(self, key: str, default: float | None = None) -> Any:
        """Return a number above 0, or the largest one of a list with one for each layer. Raises CheckpointError as
        `positive`."""
        found = self.get(key)
        if isinstance(found, tuple) and {type(one) for one in found} == {int} and max(found) > 0:
            return max(found)
        return self.positive(key, default)

    def each_layer(self, key: str, default: Any = None) -> list[Any]:
        """Return the value of each layer: a list has one for each, and may have more."""
        name = f"{self.kind}.{key}"
        found = self.file.require(name) if default is None else self.file.keys.get(name, default)
        listed = list(found[: self.layers]) if isinstance(found, tuple) else [found] * self.layers
        if len(listed) != self.layers:
            raise CheckpointError(f"{self.file.path}: {name} has {len(listed)} values for {self.layers} layers")
        return listed

    def tensor(self, name: str) -> GgufTensor | None:
        return next((one for one in self.file.tensors if one.name == name), None)

    def has(self, name: str) -> bool:
        return self.tensor(name) is not None

    def has_in_layer(self, name: str) -> bool:
        """Return whether any layer has this tensor."""
        return bool(self.layers_with(name))

    def layers_with(self, name: str) -> list[int]:
        """Return the layers that have this tensor, in order."""
        names = (one.name.split(".", 2) for one in self.file.tensors)
        return sorted(int(parts[1]) for parts in names if parts[0] == "blk" and parts[2:] == [name])

    @property
    def layers(self) -> int:
        """Number of layers without those that predict further tokens."""
        count = self.positive("block_count")
        if not count <= MAX_LAYERS:
            raise CheckpointError(
                f"{self.file.path}: {self.kind}.block_count is {count}; it must be at most {MAX_LAYERS:,}"
            )
        return int(count) - int(self.get("nextn_predict_layers", 0))

    @property
    def heads(self) -> int:
        return int(self.largest("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values, in layers that have any."""
        return int(self.largest("attention.head_count_kv", self.heads))

    @property
    def head_dim(self) -> int:
        return int(self.positive("attention.key_length", self.positive("embedding_length") // self.heads))


@dataclass(frozen=True)
class Family:
    """One kind of file."""

    architectures: tuple[str, ...]
    """Architectures of Hugging Face that are stored as this kind; the first is assumed without a config.json."""
    more: Callable[[Keys], Settings] = lambda keys: {}
    """Return the settings beside `shared`."""
    without: tuple[str, ...] = ()  # settings of `shared` that this kind does not have
    permuted: bool = False
    """Rows of q and k are permuted from the halves of a head, which RoPE rotates together, to neighbouring pairs."""
    norm: str = "rms_norm_eps"  # config key of the epsilon of norms
    layer_norm: bool = False  # norms are LayerNorm
    yarn: Callable[[Keys], Settings] = lambda keys: {}
    """Return further settings of YaRN."""
    has_attention: bool = True  # in any layer
    is_decoder: bool = True  # False: `more` returns all settings
    separate: tuple[str, str, str, str] | None = None
    """Projections to q, k and v, and of the output, into which the converter divides a fused one."""
    names: Mapping[str, str] = field(default_factory=dict)  # own names of settings of `shared` in config.json


def shared(keys: Keys, family: Family) -> Settings:
    """Return the settings that most kinds state in the same keys."""
    embedding, eps = keys.tensor("token_embd.weight"), "attention.layer_norm_rms_epsilon"
    if embedding is None:
        raise CheckpointError(f"{keys.file.path}: lacks token_embd.weight")
    if not family.is_decoder:
        return {"vocab_size": embedding.shape[0]}
    if f"{keys.kind}.{eps}" not in keys.file.keys or family.layer_norm:
        eps = "attention.layer_norm_epsilon"
    if not family.has_attention:
        return {
            "hidden_size": keys.positive("embedding_length"),
            "max_position_embeddings": min(keys.positive("context_length"), _RECURRENT_CONTEXT),
            "num_hidden_layers": keys.layers,
            family.norm: keys.positive(eps),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": not keys.has("output.weight"),
        }
    return {
        "hidden_size": keys.positive("embedding_length"),
        "intermediate_size": keys.largest("feed_forward_length", keys.get("expert_feed_forward_length")),
        "max_position_embeddings": keys.positive("context_length"),
        "num_attention_heads": keys.heads,
        "num_hidden_layers": keys.layers,
        "num_key_value_heads": keys.kv_heads,
        family.norm: keys.positive(eps),
        "head_dim": keys.head_dim,
        "partial_rotary_factor": keys.positive("rope.dimension_count", keys.head_dim) / keys.head_dim,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def layer_types(keys: Keys, default: int | None = None, unstated: int | None = None) -> Settings:
    """Return the windows and which layers have them. default: every layer but each n-th, if the file does not list
    them. unstated: the window of a file that states none."""
    window = keys.get("attention.sliding_window", unstated)
    listed = keys.get("attention.sliding_window_pattern", default)
    if not window:
        return {"sliding_window": None}
    if isinstance(listed, bool):
        listed = (listed,) * keys.layers
    if isinstance(listed, int) and listed > 0:
        listed = tuple(bool((layer + 1) % listed) for layer in range(keys.layers))
    if not isinstance(listed, tuple):
        return {"sliding_window": window}
    kinds = ["sliding_attention" if one else "full_attention" for one in listed[: keys.layers]]
    return {"sliding_window": window, "layer_types": kinds}


def routed_experts(keys: Keys) -> Settings:
    """Return the settings of experts that are chosen by groups and scores."""
    return {
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
    }


def rope_scaling(keys: Keys, yarn: Settings | None = None) -> dict[str, Any] | None:
    """Return the RoPE scaling in the form of config.json, or None. yarn: further settings of YaRN.

    llama3's scaling is stored as a tensor of divisors of the frequencies, which equals longrope with one list of
    factors and no attention scale.
    """
    context = keys.get("context_length")
    trained = keys.get("rope.scaling.original_context_length", context)
    factors = {name: keys.tensor(one) for name, one in zip(("one", "short", "long"), POSITIONS, strict=True)}
    numbers = {name: small_numbers(one) for name, one in factors.items() if one is not None}
    if "short" in numbers and "long" in numbers:
        return {
            "rope_type": "longrope",
            "short_factor": numbers["short"],
            "long_factor": numbers["long"],
            "attention_factor": keys.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": trained,
        }
    if "one" in numbers:
        return {
            "rope_type": "longrope",
            "short_factor": numbers["one"],
            "long_factor": numbers["one"],
            "attention_factor": 1.0,
            "original_max_position_embeddings": trained,
        }
    form = keys.get("rope.scaling.type", "none")
    if form == "none":
        return None
    if form not in ("linear", "yarn"):
        name = f"{keys.kind}.rope.scaling.type"
        raise CheckpointError(f"{keys.file.path}: {name} is {form!r}; supported are linear and yarn")
    scaling = {"rope_type": form, "factor": keys.positive("rope.scaling.factor")}
    if form == "yarn":
        scaling["original_max_position_embeddings"] = keys.positive("rope.scaling.original_context_length")
        scaling |= {one: keys.get(f"rope.scaling.yarn_{one}") for one in ("beta_fast", "beta_slow")}
        scaling["attention_factor"] = keys.get("rope.scaling.yarn_attn_factor")
        scaling |= yarn or {}
    return {key: value for key, value in scaling.items() if value is not None}


def small_numbers(tensor: GgufTensor) -> list[float]:
    """Return the values of a small tensor in float32."""
    if tensor.type != "F32" or tensor.bytes > MAX_FACTOR_BYTES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has type {tensor.type} and {tensor.bytes:,} bytes; it must have type F32 "
            f"and at most {MAX_FACTOR_BYTES:,} bytes"
        )
    with tensor.file.open("rb") as data:
        data.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.bytes // 4}f", data.read(tensor.bytes)))
