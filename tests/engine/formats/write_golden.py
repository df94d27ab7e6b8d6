"""Write one matrix in each format with the library that defines it, and the values that the library restores.

Run in an environment with torch and the libraries: python tests/engine/formats/write_golden.py [LIBRARY ...].
Each file of golden/ has the tensors, the values as `values`, and as metadata the library, its version and the settings.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "golden"
ROWS, INPUTS = 16, 128
FLOAT = {"type": "float"}
Case = tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]  # name, settings, tensors, values


def weight() -> torch.Tensor:
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(4)) * 0.1


def bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional

    for kind in ("nf4", "fp4"):
        for double in (False, True):
            packed, state = functional.quantize_4bit(
                weight(), quant_type=kind, compress_statistics=double, blocksize=64
            )
            settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
            tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
            values = functional.dequantize_4bit(packed, state)
            yield (
                f"{kind}{'-double' if double else ''}",
                settings | {"bnb_4bit_use_double_quant": double},
                {"weight": packed, **tensors},
                values,
            )
    rounded, scales, _ = functional.int8_vectorwise_quant(weight().half())
    values = functional.int8_vectorwise_dequant(rounded, scales)
    yield "int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"weight": rounded, "SCB": scales}, values


def hqq() -> Iterator[Case]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits, axis, group in ((8, 1, 128), (4, 1, 64), (4, 0, 16), (3, 1, 64), (2, 0, 16), (1, 1, 32)):
        linear = torch.nn.Linear(INPUTS, ROWS, bias=False)
        linear.weight.data = weight()
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        made = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
        values, made.encoded_state_dict = made.dequantize(), True
        tensors = {name: tensor for name, tensor in made.state_dict().items() if tensor is not None}
        yield f"{bits}-bits-axis-{axis}", {"quant_method": "hqq", "quant_config": config}, tensors, values


def torchao() -> Iterator[Case]:
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    configs = {
        "int8": Int8WeightOnlyConfig(),
        "fp8": Float8WeightOnlyConfig(),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int4-zeros": IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
        ),
        "int3": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(64)),
        "int8-zeros": IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=PerAxis(0), mapping_type=MappingType.ASYMMETRIC
        ),
    }
    for name, config in configs.items():
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, ROWS, bias=False))
        model[0].weight.data = weight()
        quantize_(model, config)
        values = model[0].weight.dequantize()
        tensors, _ = flatten_tensor_state_dict(model.state_dict())
        settings = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
        yield name, settings, {key.removeprefix("0."): tensor for key, tensor in tensors.items()}, values


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    forms: dict[str, tuple[str, dict[str, Any]]] = {
        "nvfp4": (
            "nvfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "scale_dtype": torch.float8_e4m3fn,
            },
        ),
        "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    } | {
        f"{bits}-bits{'' if symmetric else '-zeros'}": (
            "pack-quantized",
            {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric},
        )
        for bits in (2, 3, 4, 5, 7, 8)
        for symmetric in (True, False)
    }
    for name, (form, weights) in forms.items():
        if form.startswith("mx"):
            weights["scale_dtype"] = torch.uint8
        args = QuantizationArgs(**weights)
        state = {"weight": weight()} | _scales(weight(), args)
        values = fake_quantize(
            weight(),
            state["weight_scale"],
            state.get("weight_zero_point"),
            args,
            global_scale=state.get("weight_global_scale"),
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        tensors = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
        shown = json.loads(args.model_dump_json())
        group = {"targets": ["Linear"], "weights": shown, "input_activations": None, "format": form}
        settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        yield name, settings, {key: tensor for key, tensor in tensors.items() if tensor is not None}, values


def _scales(values: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Scales as an observer of the library computes them from the smallest and the largest number of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    found = {}
    groups = values.unflatten(1, (-1, args.group_size or INPUTS))
    low, high = groups.amin(2), groups.amax(2)
    whole = None
    if args.strategy == "tensor_group":
        whole = found["weight_global_scale"] = generate_gparam(values.amin(), values.amax())
    scales, zeros = calculate_qparams(low, high, args, global_scale=whole)
    found["weight_scale"] = scales
    if not args.symmetric:
        found["weight_zero_point"] = zeros
    return found


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "bitsandbytes": bitsandbytes,
    "hqq": hqq,
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for library in names or LIBRARIES:
        for name, settings, tensors, values in LIBRARIES[library]():
            metadata = {"library": library, "version": version(library), "settings": json.dumps(settings)}
            stored = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            save_file(
                stored | {"values": values.detach().float().contiguous()},
                FOLDER / f"{library}-{name}.safetensors",
                metadata,
            )
            print(library, name, {key: (tuple(one.shape), str(one.dtype)) for key, one in stored.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
