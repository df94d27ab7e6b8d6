"""Tiny quantized checkpoints, written from the definitions of their formats, and their dequantized values.

A projection is quantized once (`Whole`), packed by a writer in this file, and dequantized to float32 for a plain
checkpoint that transformers runs. This file uses no engine code.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {
    "vocab_size": 128,  # whole tiles, so that allocated bytes can be compared with planned bytes
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, WQLinear_GEMM.from_linear: order_map


@dataclass(frozen=True)
class Whole:
    """w[o, i] = scales[o, index[i]] · (q[o, i] - zeros[o, index[i]]), q from 0 to 2^bits - 1."""

    q: Tensor  # [outputs, inputs] int64
    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # [outputs, groups] int64
    index: Tensor  # [inputs] int64
    bits: int

    def restored(self) -> Tensor:
        return (self.q - self.zeros[:, self.index]).float() * self.scales.float()[:, self.index]


def whole(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    ordered: bool = False,
) -> Whole:
    """group: inputs that share a scale, which may be all. ordered: the inputs of a group are drawn at random."""
    inputs = weight.shape[1]
    index = torch.arange(inputs) // group
    if ordered:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    most = 2**bits - 1
    scales, zeros = [], []
    for number in range(int(index.max()) + 1):
        own = weight[:, index == number]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            scales.append(own.abs().amax(1) * 2 / most)
            zeros.append(torch.full((len(own),), 2 ** (bits - 1)))
        else:
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().long().clamp(1, most))
    made_scales, made_zeros = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1)
    q = (weight / made_scales.float()[:, index]).round().long() + made_zeros[:, index]
    return Whole(q.clamp(0, most), made_scales, made_zeros, index, bits)


def words(values: Tensor, bits: int) -> Tensor:
    """[rows, numbers] → [rows, words] int32, the first number in the lowest bits."""
    each = 32 // bits
    found = np.zeros((len(values), -(-values.shape[1] // each)), np.uint32)
    for column in range(values.shape[1]):
        found[:, column // each] |= values[:, column].numpy().astype(np.uint32) << np.uint32(bits * (column % each))
    return torch.from_numpy(found.view(np.int32))


Tensors = dict[str, Tensor]


def gptq(one: Whole, *, v2: bool = False) -> Tensors:
    return {
        "qweight": words(one.q, one.bits).T.contiguous(),
        "qzeros": words(one.zeros.T - (0 if v2 else 1), one.bits),
        "scales": one.scales.T.contiguous(),
        "g_idx": one.index.int(),
    }


def awq(one: Whole) -> Tensors:
    def columns(values: Tensor) -> Tensor:
        """[rows, outputs]: eight neighbours to a word, in AutoAWQ's order."""
        shuffled = values.reshape(len(values), -1, 8)[:, :, list(AWQ_NIBBLES)]
        return words(shuffled.reshape(len(values), -1), 4)

    return {"qweight": columns(one.q.T), "qzeros": columns(one.zeros.T), "scales": one.scales.T.contiguous()}


def packed(one: Whole, *, symmetric: bool = True, ordered: bool = False) -> Tensors:
    found = {
        "weight_packed": words(one.q, one.bits),
        "weight_scale": one.scales,
        "weight_shape": torch.tensor(one.q.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = words(one.zeros.T, one.bits).T.contiguous()
    if ordered:
        found["weight_g_idx"] = one.index.int()
    return found


def int8(one: Whole) -> Tensors:
    return {"weight": (one.q - 128).to(torch.int8), "weight_scale": one.scales}


@dataclass(frozen=True)
class Kind:
    """A format, its quantization_config, how a weight is quantized, and how that is written."""

    settings: dict[str, Any]
    quantize: Callable[[Tensor], Whole]
    write: Callable[[Whole], Tensors]
    bits: int
    group: int | None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Projections that stay plain."""
        return tuple(self.settings.get("ignore", ()))


def _gptq(bits: int, group: int, *, symmetric: bool = True, v2: bool = False, ordered: bool = False) -> Kind:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        **({"checkpoint_format": "gptq_v2"} if v2 else {}),
    }
    return Kind(
        settings,
        lambda w: whole(w, bits, w.shape[1] if group == -1 else group, symmetric=symmetric, ordered=ordered),
        lambda one: gptq(one, v2=v2),
        bits,
        None if group == -1 else group,
    )


def _awq(group: int) -> Kind:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Kind(settings, lambda w: whole(w, 4, group, symmetric=False), awq, 4, group)


def _compressed(
    form: str,
    bits: int,
    group: int | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    inputs: dict[str, Any] | None = None,
) -> Kind:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": "group" if ordered else None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
        "quantization_status": "compressed",
    }

    def quantize(w: Tensor) -> Whole:
        return whole(w, bits, group or w.shape[1], symmetric=symmetric, dtype=dtype, ordered=ordered)

    def write(one: Whole) -> Tensors:
        return int8(one) if form == "int-quantized" else packed(one, symmetric=symmetric, ordered=ordered)

    return Kind(settings, quantize, write, bits, group)


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
KINDS = {
    "gptq-128": _gptq(4, 128),
    "gptq-32-zeros": _gptq(4, 32, symmetric=False),
    "gptq-v2-64-zeros": _gptq(4, 64, symmetric=False, v2=True),
    "gptq-64-ordered": _gptq(4, 64, symmetric=False, ordered=True),
    "gptq-channel": _gptq(4, -1),
    "gptq-8-bits": _gptq(8, 32, ordered=True),
    "awq-64": _awq(64),
    "packed-128": _compressed("pack-quantized", 4, 128),
    "packed-32-zeros": _compressed("pack-quantized", 4, 32, symmetric=False),
    "packed-64-ordered": _compressed("pack-quantized", 4, 64, torch.float32, ordered=True),
    "packed-channel": _compressed("pack-quantized", 4, None, torch.float16, symmetric=False),
    "packed-8-bits": _compressed("pack-quantized", 8, None),
    "w8a8": _compressed("int-quantized", 8, None, inputs=DYNAMIC),
    "int8-groups": _compressed("int-quantized", 8, 64, torch.float32),
}


def random_model(architecture: str = "Llama", **more: Any) -> Any:
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **more})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (parameter if parameter.ndim == 1 else 0))
    return model


def projections(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"}


@dataclass(frozen=True)
class Written:
    """The quantized checkpoint, and the same numbers in float32."""

    path: Path
    plain: Path

    def tensors(self) -> Tensors:
        return load_file(self.path / "model.safetensors")

    def change(self, **tensors: Tensor | None) -> None:
        """Replace tensors by name, with a double underscore for each dot. None removes a tensor."""
        found = self.tensors()
        for name, tensor in ((name.replace("__", "."), tensor) for name, tensor in tensors.items()):
            assert tensor is not None or name in found
            found.pop(name, None)
            found |= {} if tensor is None else {name: tensor}
        save_file(found, self.path / "model.safetensors")

    def leave_out(self, name: str) -> None:
        """Makes a projection in fp8 a plain one, of the same numbers."""
        plain = load_file(self.plain / "model.safetensors")[f"{name}.weight"]
        scales = {one: None for one in self.tensors() if one.startswith(f"{name}.") and "_scale" in one}
        self.change(**scales, **{f"{name}.weight": plain})
        settings = json.loads((self.path / "config.json").read_text())["quantization_config"]
        key = next(key for key in ("ignore", "ignored_layers", "modules_to_not_convert") if key in settings)
        self.configure(**{key: [*settings[key], name]})

    def configure(self, **settings: Any) -> None:
        """Changes entries of quantization_config."""
        file = self.path / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"] |= settings
        file.write_text(json.dumps(config))

    def model(self) -> Any:
        """transformers, with the restored weights."""
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.plain, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def logits(self, ids: list[int]) -> Tensor:
        """Return transformers' logits of each position."""
        return _logits(self, (self.plain / "model.safetensors").stat().st_mtime_ns, tuple(ids))


@cache
def _logits(made: Written, written_ns: int, ids: tuple[int, ...]) -> Tensor:
    """Return the logits of transformers, computed once for all kernels that are compared with them."""
    with torch.no_grad():
        return _read(made, written_ns)(torch.tensor([ids])).logits[0]


@lru_cache(maxsize=4)
def _read(made: Written, written_ns: int) -> Any:
    return made.model()


def write(folder: Path, kind: Kind, architecture: str = "Llama", **more: Any) -> Written:
    model = random_model(architecture, **more)
    ignored = kind.left_out
    own: Tensors = {}
    with torch.no_grad():
        for name, module in projections(model).items():
            if name not in ignored:
                one = kind.quantize(module.weight)
                module.weight.copy_(one.restored())
                own |= {f"{name}.{suffix}": tensor for suffix, tensor in kind.write(one).items()}
    made = Written(folder / "quantized", folder / "plain")
    model.save_pretrained(made.plain)
    shutil.copytree(made.plain, made.path)
    covered = {f"{name}.weight" for name in projections(model) if name not in ignored}
    plain = load_file(made.plain / "model.safetensors")
    for name in [name for name in plain if ".experts." in name]:  # the model holds them in one tensor, the file apart
        one = kind.quantize(plain[name])
        plain[name] = one.restored().to(plain[name].dtype)
        own |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in kind.write(one).items()}
        covered.add(name)
    save_file(plain, made.plain / "model.safetensors", {"format": "pt"})
    rest = {name: tensor for name, tensor in plain.items() if name not in covered}
    save_file({name: tensor.contiguous() for name, tensor in (rest | own).items()}, made.path / "model.safetensors")
    routers = {"modules_to_not_convert": ["mlp.gate"]} if any(".mlp.gate." in name for name in plain) else {}
    config = json.loads((made.path / "config.json").read_text()) | {"quantization_config": kind.settings | routers}
    (made.path / "config.json").write_text(json.dumps(config))
    return made
