"""Storage formats of quantized projections: the meaning of their settings, and which are supported.

    w = scale · (q - zero)

gptq                q packed along the inputs; zero points minus 1 (v1) or unchanged (gptq_v2); scales
                    [groups, outputs]; desc_act: g_idx has the group of each input. Source: AutoGPTQ, GPTQModel
awq                 q packed along the outputs, eight per word in AWQ_ORDER (version gemm). Source: AutoAWQ
compressed-tensors  pack-quantized: q + 8 or q + 128 packed along the inputs, scales [outputs, groups or 1];
                    int-quantized, naive-quantized: plain int8. Source: compressed-tensors 0.20
fp8                 w = scale · q with q in float8_e4m3fn; one scale per matrix, per output or per block of 128 x 128.
                    Used by compressed-tensors (float-quantized), method fp8 of transformers and AutoFP8, and ModelOpt's
                    FP8. Source: compressed-tensors 0.20, transformers 5, AutoFP8
gguf                blocks of a ggml type, each with its scale. Source: gguf 0.19, `engine.models.gguf`
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each four bits of a word, from the lowest bits on
CHANNEL_GROUP = 128  # matrices with one scale per output are stored in groups of this size with equal scales
GROUP_MULTIPLE = 32
FP8_BLOCK = 128  # number of outputs, and of inputs, of an fp8 block with one scale

Form = Literal["gptq", "awq", "packed", "int8", "gguf", "turned", "fp8"]
Scales = Literal["tensor", "channel", "block"]


class UnsupportedScheme(Exception):
    """Raised with the reason why settings are not supported."""


@dataclass(frozen=True)
class Scheme:
    """Storage format of one projection."""

    form: Form  # "turned": plain numbers whose rows are permuted (`heads`)
    bits: int  # 4 or 8 for integers; 0: fp8, or a ggml type that is dequantized when it is loaded
    group: int | None  # number of inputs that share a scale; None: all
    zeros: bool = False  # has zero points; else the zero point is the midpoint
    zero_offset: int = 0  # added to stored zero points
    ordered: bool = False  # an index assigns inputs to groups (act order); else groups are contiguous
    heads: int = 0  # rows of this many heads are permuted to interleaved halves, as GGUF does for Llama; 0: no
    scales: Scales | None = None  # fp8: granularity of the scales
    inputs: Literal["static", "dynamic"] | None = None
    """fp8: how activations are quantized: by a scale of the checkpoint, by a scale for each token, or not."""
    named: tuple[str, str] = ("weight_scale", "input_scale")  # tensors of the weight's and the activations' scale

    def __str__(self) -> str:
        if self.scales is not None:
            return f"fp8, {_SCALES_IN_WORDS[self.scales]}"
        if not self.bits:
            return "other types"
        return f"{self.bits} bits, {'one scale per output' if self.group is None else f'groups of {self.group}'}"


_SCALES_IN_WORDS = {
    "tensor": "one scale per matrix",
    "channel": "one scale per output",
    "block": f"blocks of {FP8_BLOCK} x {FP8_BLOCK}",
}


@dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint."""

    method: str
    schemes: Mapping[str, Scheme]  # of each quantized projection, by path

    @property
    def is_plain(self) -> bool:
        """True if no projection is quantized and rows are at most permuted."""
        return all(scheme.form == "turned" for scheme in self.schemes.values())

    def __str__(self) -> str:
        """Return a short description such as `4 bits (gptq, groups of 128)`."""
        kinds = list(dict.fromkeys(str(scheme) for scheme in self.schemes.values() if scheme.form != "turned"))
        if len(kinds) > 1 or "other types" in kinds:
            return f"{self.method} ({'; '.join(kinds)})"
        bits, _, more = kinds[0].partition(", ")
        return f"{bits} ({', '.join(filter(None, (self.method, more)))})"


def alike(schemes: Iterable[Scheme | None]) -> bool:
    """Return whether the sources of a fused matrix can be stored as one integer matrix."""
    found = {None if scheme is None or not scheme.bits else (scheme.bits, scheme.group) for scheme in schemes}
    return len(found) == 1 and None not in found


def alike_fp8(schemes: Iterable[Scheme | None]) -> bool:
    """Return whether the sources of a fused matrix can be stored as one fp8 matrix. Scales per output and per matrix
    can
    be combined, block scales only with block scales, and activations must be quantized in the same way."""
    found = {None if one is None or one.scales is None else (one.scales == "block", one.inputs) for one in schemes}
    return len(found) == 1 and None not in found


def gptq(settings: Mapping[str, Any]) -> Scheme:
    bits: Any = settings.get("bits")
    symmetric = settings.get("sym", True) is True
    if bits not in (4, 8) or (bits == 8 and not symmetric):
        _refuse("bits", bits, "gptq is supported with 4 bits, and with 8 if sym is true")
    form = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        _refuse("checkpoint_format", form, "supported are gptq and gptq_v2")
    for key in ("is_marlin_format", "dynamic", "modules_in_block_to_quantize"):
        if settings.get(key):
            _refuse(key, settings[key], "it must be left out")
    return Scheme(
        form="gptq",
        bits=bits,
        group=_group(settings.get("group_size", 128), "group_size"),
        zeros=not symmetric,
        zero_offset=1 if form == "gptq" else 0,
        ordered=settings.get("desc_act") is True,
    )


def awq(settings: Mapping[str, Any]) -> Scheme:
    if settings.get("bits", 4) != 4:
        _refuse("bits", settings["bits"], "awq is supported with 4 bits")
    version = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        _refuse("version", version, "supported is gemm")
    if settings.get("zero_point", True) is not True:
        _refuse("zero_point", settings["zero_point"], "it must be true")
    return Scheme(form="awq", bits=4, group=_group(settings.get("group_size", 128), "group_size"), zeros=True)


def compressed(settings: Mapping[str, Any], name: str) -> Scheme:
    """Return the scheme of a group of a compressed-tensors checkpoint."""
    group = settings["config_groups"][name]
    form = group.get("format") or settings.get("format")
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and settings[key].get("format") != "dense":
            _refuse(key, settings[key], "it must be left out")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if isinstance(weights, dict) and weights.get("type") == "float":
        return _compressed_fp8(group, form, name)
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        _refuse(f"{name}.weights", weights, "supported are whole numbers, and float of 8 bits")
    if inputs is not None and (inputs.get("num_bits") != 8 or inputs.get("type") != "int" or not inputs.get("dynamic")):
        _refuse(f"{name}.input_activations", inputs, "supported are none, and dynamic int8")
    bits, symmetric, strategy = weights.get("num_bits"), weights.get("symmetric", True), weights.get("strategy")
    if strategy not in ("group", "channel"):
        _refuse(f"{name}.weights.strategy", strategy, "supported are group and channel")
    size = None if strategy == "channel" else _group(weights.get("group_size"), f"{name}.weights.group_size")
    ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    if form == "pack-quantized" and (bits == 4 or (bits == 8 and symmetric)):
        return Scheme(form="packed", bits=bits, group=size, zeros=not symmetric, ordered=ordered)
    if form in ("int-quantized", "naive-quantized") and bits == 8 and symmetric and not ordered:
        return Scheme(form="int8", bits=8, group=size)
    which = "asymmetric " if not symmetric else ""
    raise UnsupportedScheme(
        f"config_groups.{name} is {which}{form} of {bits} bits; supported are pack-quantized of 4 bits, pack-quantized "
        "and int-quantized of 8 where symmetric"
    )


def _compressed_fp8(group: Mapping[str, Any], form: Any, name: str) -> Scheme:
    """Return the scheme of a group with weights of type float."""
    weights, inputs = group["weights"], group.get("input_activations")
    if form not in ("float-quantized", "naive-quantized") or weights.get("num_bits") != 8:
        raise UnsupportedScheme(
            f"config_groups.{name} is {form} of {weights.get('num_bits')} bits in floats; supported is float-quantized "
            "of 8"
        )
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        _refuse(f"{name}.weights", weights, "supported are symmetric ones that are stored")
    strategy = weights.get("strategy")
    scales = _one_of(f"{name}.weights.strategy", strategy, ("tensor", "channel", "block"))
    if scales == "block":
        _check_block(f"{name}.weights.block_structure", weights.get("block_structure"))
    if group.get("output_activations"):
        _refuse(f"{name}.output_activations", group["output_activations"], "it must be left out")
    return Scheme("fp8", 0, None, scales=scales, inputs=None if inputs is None else _compressed_inputs(inputs, name))


def _compressed_inputs(inputs: Mapping[str, Any], name: str) -> Literal["static", "dynamic"]:
    key = f"{name}.input_activations"
    if inputs.get("num_bits") != 8 or inputs.get("type") != "float" or inputs.get("symmetric", True) is not True:
        _refuse(key, inputs, "with fp8 weights, supported are none, and symmetric float of 8 bits")
    if inputs.get("dynamic") is True:
        return "dynamic"
    if inputs.get("dynamic") or inputs.get("strategy") != "tensor":
        _refuse(key, inputs, "supported are dynamic ones, and static ones of strategy tensor")
    return "static"


def fp8(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of transformers' and AutoFP8's method. Scales per matrix have either name (`with_names`)."""
    _one_of("fmt", settings.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _one_of("expert_dtype", settings.get("expert_dtype", "fp8"), ("fp8",))
    if settings.get("modules_to_convert"):
        _refuse("modules_to_convert", settings["modules_to_convert"], "it must be left out")
    scheme = str(settings.get("activation_scheme", "dynamic")).lower()
    inputs: Any = _one_of("activation_scheme", scheme, ("dynamic", "static"))
    block = settings.get("weight_block_size")
    if block is None:
        return Scheme("fp8", 0, None, scales="tensor", inputs=inputs)
    _check_block("weight_block_size", block)
    return Scheme("fp8", 0, None, scales="block", inputs=inputs, named=INVERSES)


def modelopt(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of ModelOpt, which has the tensors of AutoFP8."""
    algorithm = settings.get("quant_algo")
    if algorithm != "FP8":
        _refuse("quant_algo", algorithm, "supported for modelopt is FP8")
    return Scheme("fp8", 0, None, scales="tensor", inputs="static")


INVERSES = ("weight_scale_inv", "activation_scale")  # transformers' names; the values are scales, not inverses


def with_names(quantization: Quantization, tensors: Container[str]) -> Quantization:
    """Set the names that an fp8 checkpoint gives to the scales of entire matrices."""
    schemes = {
        path: replace(scheme, named=INVERSES)
        if scheme.scales == "tensor" and f"{path}.{INVERSES[0]}" in tensors and f"{path}.weight_scale" not in tensors
        else scheme
        for path, scheme in quantization.schemes.items()
    }
    return replace(quantization, schemes=schemes)


def _check_block(key: str, value: Any) -> None:
    if not isinstance(value, list) or value != [FP8_BLOCK, FP8_BLOCK]:
        _refuse(key, value, f"supported is [{FP8_BLOCK}, {FP8_BLOCK}]")


def _one_of(key: str, value: Any, served: tuple[str, ...]) -> Any:
    if value not in served:
        _refuse(key, value, f"supported are {', '.join(served)}" if len(served) > 1 else f"supported is {served[0]}")
    return value


def _group(size: Any, key: str) -> int | None:
    """Return the number of inputs per group, or None for -1 (all inputs)."""
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % GROUP_MULTIPLE:
        _refuse(key, size, f"supported are multiples of {GROUP_MULTIPLE}, and -1")
    return int(size)


def _refuse(key: str, value: Any, served: str) -> None:
    raise UnsupportedScheme(f"{key} is {value!r}; {served}")
