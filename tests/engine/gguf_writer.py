"""Tiny random models of transformers, written as GGUF files in the layout of llama.cpp's converter.

The package gguf has the names of the tensors. Other changes of the converter (rows of q and k, weights of norms,
tensors of experts, the halves of a latent projection) follow its source, conversion/*.py. Uses no engine code.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PretrainedConfig

PERMUTED = (
    *("llama", "granite", "granitemoe", "granitehybrid", "arcee", "minicpm", "smollm3", "mistral3"),
    *("olmo", "internlm2", "arctic"),
)
MAMBA_2 = ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")
PLAIN: Mapping[str, Type] = {}
SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,)}  # places of float16 numbers in a block
SCALES |= dict.fromkeys((Type.Q4_K, Type.Q5_K, Type.Q4_1, Type.Q5_1), (0, 2))
ONE_MORE = ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next", "qwen35", "qwen35moe", "step35")
"""Kinds with norms to whose weights the converter adds 1."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
MEMBER = re.compile(r"(.*altup\w*projections)\.(\d+)\.weight")


@dataclass(frozen=True)
class Kind:
    """Architecture of a file, with the metadata keys that only this architecture has."""

    name: str  # general.architecture
    keys: dict[str, Any] = field(default_factory=dict)


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind,
    *,
    parts: int = 1,
    types: Mapping[str, Type] = PLAIN,
    restored: bool = False,
    source: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a file, or one split into `parts`; return the first. types: of tensors whose name has this in it, with
    drawn numbers. restored: write these numbers in float32. source: tensors of the original checkpoint, if they are not
    those of the model."""
    found = model.state_dict() if source is None else source
    config = model.config
    if kind.name == "step35":
        config = config.text_config
    if kind.name in ("gemma4", "step35"):
        config.allow_global_per_layer_attribute_access = True
    tensors = _tensors(_stacked(found), config, kind.name)
    keys = {**_keys(config), **_activations(found), **kind.keys}
    if kind.name == "gemma4":
        tensors["rope_freqs.weight"] = _divisors(config)
    if kind.name == "step35":
        tensors["rope_freqs.weight"] = _llama3_divisors(config)
    names = (
        [path] if parts == 1 else [path.with_name(f"{path.stem}-{n + 1:05}-of-{parts:05}.gguf") for n in range(parts)]
    )
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, kind.name)
        for key, value in (keys if number == 0 else {}).items():
            _add(writer, key if key.startswith(("tokenizer.", "xielu.")) else f"{kind.name}.{key}", value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for own in list(tensors)[number::parts]:
            values = np.ascontiguousarray(tensors[own].numpy())
            wanted = next((type for part, type in types.items() if part in own and own.endswith("weight")), None)
            if wanted is None:
                writer.add_tensor(own, values)
                continue
            blocks = drawn_blocks(values.shape, wanted)
            if restored:
                writer.add_tensor(own, gguf.quants.dequantize(blocks, wanted))
            else:
                writer.add_tensor(own, blocks, raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0]


def drawn_blocks(shape: tuple[int, ...], type: Type) -> np.ndarray:
    """Return blocks of drawn bits, [..., bytes of a row], whose values have a standard deviation of about 0.1."""
    inputs, size = gguf.GGML_QUANT_SIZES[type]
    draw = np.random.default_rng(shape[-2])
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // inputs, size), dtype=np.uint8)
    if type == Type.MXFP4:
        blocks[..., 0] = 121
        return blocks.reshape(*shape[:-1], -1)
    for at in SCALES.get(type, (0,)):
        blocks[..., at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    size = gguf.quants.dequantize(blocks.reshape(-1, blocks.shape[-1] * blocks.shape[-2]), type).std()
    for at in SCALES.get(type, (0,)):
        blocks[..., at : at + 2] = np.array([0.1 / size], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _keys(c: PretrainedConfig) -> dict[str, Any]:
    """Return the keys that the converter writes for every kind."""
    rope = getattr(c, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": c.num_hidden_layers,
        "context_length": getattr(c, "max_position_embeddings", 2**20),
        "embedding_length": c.hidden_size,
        "feed_forward_length": getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        "attention.head_count": getattr(c, "num_attention_heads", 0),
        "attention.head_count_kv": getattr(c, "num_key_value_heads", None),
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": getattr(c, "head_dim", None),
        "tokenizer.ggml.eos_token_id": 2,
    }
    eps = getattr(c, "rms_norm_eps", getattr(c, "norm_eps", None))
    names = "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"
    layer_eps = next((getattr(c, one) for one in names if hasattr(c, one)), None)
    if eps is None and c.model_type.startswith("mamba"):
        eps, layer_eps = layer_eps, None
    found |= {"attention.layer_norm_rms_epsilon": eps, "attention.layer_norm_epsilon": layer_eps}
    if rope["rope_type"] in ("yarn", "linear"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return {key: value for key, value in found.items() if value is not None}


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with one for each projection of all experts of a layer, and for the projections of AltUp."""
    found, parts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name in sorted(tensors, key=lambda one: [int(part) if part.isdigit() else 0 for part in one.split(".")]):
        tensor = tensors[name]
        expert, member = EXPERT.fullmatch(name), MEMBER.fullmatch(name)
        if expert is None and member is None:
            found[name] = tensor
            continue
        whole = f"{expert[1]}.{expert[3]}.weight" if expert is not None else f"{member[1]}.weight"  # type: ignore[index]
        parts.setdefault(whole, []).append(tensor)
    return found | {name: torch.stack(ones) for name, ones in parts.items()}


def _activations(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the numbers of Apertus' activations, as keys."""
    names = [name for name in tensors if ".act_fn." in name]
    return {
        f"xielu.{last}": [float(tensors[name]) for name in names if name.endswith(f".{last}")]
        for last in dict.fromkeys(name.rpartition(".")[2] for name in names)
    }


def _divisors(config: Any) -> Tensor:
    """Return the divisors of frequencies of Gemma 4's full layers: those that do not turn have 1e30."""
    half = config.head_dim  # of sliding layers; that of full ones is twice as large
    turned = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * turned + [1e30] * (half - turned))


def _llama3_divisors(config: Any) -> Tensor:
    """Return the divisors of frequencies of Step-3.5's full layers, filled with 1 to half of a head."""
    rope = config.rope_parameters["full_attention"]
    turned = int(config.head_dim * rope["partial_rotary_factor"])
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, turned, 2) / turned)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{one}_freq_factor"] for one in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = torch.where(waves < high, 1.0, torch.where(waves > low, rope["factor"], between))
    return torch.cat((divisors, torch.ones((config.head_dim - turned) // 2)))


def _names(arch: gguf.MODEL_ARCH, layers: int) -> gguf.TensorNameMap:
    """Return the names of tensors, by a table of its own: the package adds the names of some architectures to that of
    all."""

    class Names(gguf.TensorNameMap):
        block_mappings_cfg = dict(gguf.TensorNameMap.block_mappings_cfg)

    return Names(arch, layers)


def _tensors(source: Mapping[str, Tensor], config: Any, kind: str) -> dict[str, Tensor]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = _names(arch, max(config.num_hidden_layers, getattr(config, "num_decoder_layers", 0)))
    found: dict[str, Tensor] = {}
    for name, tensor in source.items():
        tied = torch.equal(tensor, source["shared.weight"]) if kind.startswith("t5") else config.tie_word_embeddings
        if (
            (name == "lm_head.weight" and tied)
            or ".act_fn." in name
            or (kind.startswith("t5") and "embed_tokens" in name)
        ):
            continue
        for changed, value in _changed(name, tensor.clone(), config, kind):
            path, _, last = changed.rpartition(".")
            if changed.startswith("blk."):
                found[changed] = value
                continue
            if changed.endswith("e_score_correction_bias"):
                path, last = changed.removesuffix("_bias"), "bias"
            if (bare := known.get_name(changed)) is not None:  # A and D of a recurrence
                found[bare] = value
                continue
            own = known.get_name(path)
            assert own is not None, changed
            found[f"{own}.{last}"] = value
    return found


def _changed(name: str, tensor: Tensor, config: Any, kind: str) -> list[tuple[str, Tensor]]:
    """Return the tensors that are written for one tensor, under names that the package knows."""
    if kind.startswith("nemotron_h"):
        name = re.sub(r"^model\.", "backbone.", name).replace("e_score_correction_bias", "e_score_correction.bias")
    stem, _, last = name.rpartition(".")
    if last == "expert_bias":
        return [(f"{name}.bias", tensor)]
    if last in ("sinks", "attention_sink_bias", "layer_scalar", "correct_output_scale"):
        return [(f"{name}.weight", tensor)]
    if last in ("scale", "per_expert_scale"):  # Gemma 4
        layer = name.split(".")[2]
        return [(f"blk.{layer}.{'ffn_gate_inp' if last == 'scale' else 'ffn_down_exps'}.scale", tensor)]
    if name.endswith(".moe.router_bias"):
        return [(f"{name}.bias", tensor)]
    if (expert := re.fullmatch(r"model\.layers\.(\d+)\.moe\.(\w+)_proj\.weight", name)) is not None:  # Step-3.5
        return [(f"blk.{expert[1]}.ffn_{expert[2]}_exps.weight", tensor)]
    if re.fullmatch(r".*\.experts\.\w+\.weight", name) or kind == "gemma4":
        return [(f"{name}.weight" if ".experts." in name and last != "weight" else name, tensor)]
    if kind.startswith("qwen35") and ".linear_attn." in name:
        tensor = _tiled(name, tensor, config)
    if (changed := _recurrent(name, tensor, config, kind) or _fused(name, tensor, config, kind)) is not None:
        return changed
    if kind in PERMUTED and re.search(r"\b[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return [(name, tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape))]
    if kind in ONE_MORE and name.endswith("norm.weight"):
        return [(name, tensor + 1)]
    if name.endswith("kv_b_proj.weight") and kind != "minicpm3":
        by_head = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = by_head[:, : config.qk_nope_head_dim], by_head[:, config.qk_nope_head_dim :]
        halves = {"k_b_proj": keys.transpose(1, 2), "v_b_proj": values}
        return [(name.replace("kv_b_proj", half), one) for half, one in halves.items()]
    if kind == "gpt-oss" and ".experts." in name:
        projection, _, suffix = last.rpartition("_") if last.endswith("_bias") else (last, "", "weight")
        tensor = tensor if suffix == "bias" else tensor.transpose(1, 2)
        if projection == "down_proj":
            return [(f"{stem}.down_proj.{suffix}", tensor)]
        return [(f"{stem}.{one}_proj.{suffix}", tensor[:, at::2]) for at, one in enumerate(("gate", "up"))]
    layer = "model.layers." + (name.split(".")[2] if ".layers." in name else "") + ".mlp"
    if ".experts." in name:
        tensor = tensor.transpose(1, 2) if kind == "llama4" else tensor
        if last in ("up_proj", "down_proj"):  # Nemotron-H's have no gate
            return [(f"{layer}.experts.{last}.weight", tensor)]
        gate, up = tensor.chunk(2, 1)
        return [(f"{layer}.experts.gate_proj.weight", gate), (f"{layer}.experts.up_proj.weight", up)]
    if "shared_mlp." in name and kind != "hunyuan-moe":
        if stem.endswith("output_linear"):
            return [(f"{layer}.shared_expert.down_proj.weight", tensor)]
        gate, up = tensor.chunk(2)
        return [(f"{layer}.shared_expert.gate_proj.weight", gate), (f"{layer}.shared_expert.up_proj.weight", up)]
    return [(name.replace("moe.router.", "moe.router.layer.").replace(".moe_statics.", "."), tensor)]


def _recurrent(name: str, tensor: Tensor, config: Any, kind: str) -> list[tuple[str, Tensor]] | None:
    """Return the changed tensors of a recurrence: A instead of its logarithm, one column for each head of Mamba-2, and
    the projections of Qwen3-Next with all rows of q before the rows of k, v and z."""
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    if name.endswith((".A_log", "mixer.D", "mamba.D")):
        return [(name, tensor.unsqueeze(1) if tensor.ndim == 1 and kind in MAMBA_2 else tensor)]
    if name.endswith(".dt_bias"):
        return [(name.replace(".dt_bias", ".dt_proj.bias"), tensor)]
    if "conv1d.weight" in name:
        return [(name, tensor.unsqueeze(0) if kind == "kimi-linear" else tensor.squeeze(1))]
    if kind in MAMBA_2 and name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        return [(name, tensor.view(groups, -1))]
    if name.endswith("linear_attn.norm.weight"):
        return [(name, tensor)]
    if name.endswith("in_proj_qkvz.weight"):
        heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        keys, values = config.linear_key_head_dim, each * config.linear_value_head_dim
        parts = tensor.view(heads, -1, tensor.shape[1]).split([keys, keys, values, values], 1)
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        base = name.removesuffix("in_proj_qkvz.weight")
        return [(f"{base}in_proj_qkv.weight", torch.cat((q, k, v))), (f"{base}in_proj_z.weight", z)]
    return None


def _tiled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return a tensor of Qwen3.5's DeltaNet with the value heads by number within their groups, as
    _LinearAttentionVReorderBase of the converter."""
    groups, width = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // groups

    def turned(part: Tensor, size: int) -> Tensor:
        return part.reshape(groups, each, size, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    if "in_proj_qkv." in name or "conv1d." in name:
        keys = 2 * groups * config.linear_key_head_dim
        return torch.cat((tensor[:keys], turned(tensor[keys:], width)))
    if "in_proj_z." in name:
        return turned(tensor, width)
    if "out_proj." in name:
        return turned(tensor.t(), width).t()
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", ".A_log", ".dt_bias")):
        return turned(tensor, 1)
    return tensor


def _divided(name: str, tensor: Tensor, config: Any, kind: str) -> list[tuple[str, Tensor]]:
    """Return q, k and v of a fused projection, the first two with rows in pairs."""
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = len(tensor) // (heads + 2 * kv_heads)
    q, k, v = tensor.split([heads * width, kv_heads * width, kv_heads * width])
    q, k = (
        one.view(count, 2, -1, *one.shape[1:]).transpose(1, 2).reshape(one.shape)
        for one, count in ((q, heads), (k, kv_heads))
    )
    layer = name.split(".")[2]
    return [(f"blk.{layer}.attn_{one}.weight", part) for one, part in zip("qkv", (q, k, v), strict=True)]


def _fused(name: str, tensor: Tensor, config: Any, kind: str) -> list[tuple[str, Tensor]] | None:
    """Return the tensors that are written for fused projections: all rows of q, then of k, then of v; no transposed
    matrices."""
    if kind in ("gpt2",) and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return [(name, tensor.t())]
    if ("W_pack" in name and kind == "baichuan") or ("query_key_value" in name and kind == "bailingmoe"):
        return _divided(name, tensor, config, kind)
    if kind == "bailingmoe2" and "query_key_value" in name:
        return [(name, tensor)]
    if kind == "bloom":
        name = name.removeprefix("transformer.")
    if "query_key_value" not in name:
        return [(name, tensor)] if kind == "bloom" else None
    heads = config.num_attention_heads
    groups = config.num_kv_heads if kind == "falcon" else heads
    parts = tensor.view(groups, heads // groups + 2, -1, *tensor.shape[1:]).split([heads // groups, 1, 1], 1)
    return [(name, torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts]))]
