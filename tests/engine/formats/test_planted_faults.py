"""Faults planted in the code of formats. The comparison with an independent reference must notice each.

A fault replaces text in the source of one function, or a constant, until the test ends. The references are the writers
of tests/engine (they use no engine code), and the package gguf for blocks of ggml. Tests of whole checkpoints with the
same references are in tests/engine/layers.
"""

import inspect
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.formats import (
    awq,
    bitsandbytes,
    compressed_tensors,
    floats,
    fp8,
    ggml,
    gptq,
    hqq,
    integers,
    marlin,
    quark,
    torchao,
)
from engine.formats.format import Format
from engine.formats.native import E4M3, GgmlBlocks, Groups, Native
from engine.formats.registry import find_method
from engine.weights import fused as fusing
from engine.weights.slot import Slot, Slots
from kernels import block_codes, integer_matmul, planes, quantisation, stored_codes
from kernels import integers as gpu_integers
from kernels.block_weights import pack_blocks
from kernels.ggml_layout import LAYOUTS
from kernels.integers import pack_integers
from kernels.plane_layout import DOUBLED, PLANES
from kernels.stored_codes import StoredCodes
from tests.engine.float_writers import FLOAT_KINDS
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.gguf_writer import drawn_blocks
from tests.engine.integer_writers import INTEGER_KINDS
from tests.engine.library_writers import LIBRARY_KINDS
from tests.engine.quantized_writers import KINDS

ROWS, INPUTS = 192, 256  # several groups, blocks of fp8, tiles of Marlin
WRITTEN = {**KINDS, **FLOAT_KINDS, **INTEGER_KINDS, **LIBRARY_KINDS, **FP8_KINDS}
CPU = torch.device("cpu")


@dataclass
class Matrix:
    """The tensors of one matrix, its format, and the values of the reference."""

    format: Format
    tensors: dict[str, Tensor]
    values: Tensor
    kind: str = ""  # type of ggml

    path, rows, inputs = "m", ROWS, INPUTS

    def read(self, suffix: str) -> Tensor:
        return self.tensors[suffix]

    def has(self, suffix: str) -> bool:
        return suffix in self.tensors

    def type(self, suffix: str) -> str:
        return self.kind

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(text)


@cache
def written(name: str, seed: int = 0) -> Matrix:
    """A matrix of a format that tests/engine writes. The format is found again, because a fault may be in the search
    for it."""
    kind = WRITTEN[name]
    weight = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(seed)) * 0.1
    made = kind.quantize(weight)
    return Matrix(declared(name), kind.write(made), made.restored())


def declared(name: str) -> Format:
    settings = WRITTEN[name].settings
    method = find_method(settings["quant_method"])
    assert method is not None
    return method.format(settings, next(iter(method.groups(settings, ["m"], "lm_head", "config.json").values())))


@cache
def blocks(kind: str, heads: int = 0) -> Matrix:
    """A matrix in blocks of ggml, with rows permuted as llama.cpp's converter does."""
    raw = drawn_blocks((ROWS, INPUTS), Type[kind])
    values = gguf.quants.dequantize(raw, Type[kind])
    if heads:  # LlamaModel.permute
        raw = raw.reshape(heads, 2, ROWS // heads // 2, -1).swapaxes(1, 2).reshape(ROWS, -1)
    format = ggml.format_of(kind, heads)
    assert format is not None
    return Matrix(format, {"weight": torch.from_numpy(np.ascontiguousarray(raw))}, torch.from_numpy(values), kind)


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got.float(), want, rtol=3e-7, atol=1e-9)


def is_read(matrix: Matrix, format: Format | None = None) -> bool:
    """Return whether the values are those of the reference, dequantized and as each executor has them."""
    format = format or matrix.format
    found = [format.dequantize(matrix)]
    if format.native is not None and format.native.roles("compiled"):
        found += [(made := format.unpack(matrix)).restored(), pack_integers(made, CPU).restored()]
    if isinstance(format.on("triton"), GgmlBlocks):
        found += [(made := format.blocks(matrix)).restored(), pack_blocks(made, CPU).restored()]
    return all(close(one, matrix.values) for one in found)


def is_fused(names: tuple[str, str], native: Native, *, whole: bool = False) -> bool:
    """Return whether a rank's share of two fused matrices is right: the last 64 rows of the first and all of the
    second, of the second half of the inputs. whole: of all inputs."""
    parts = {f"{at}": written(name, at) for at, name in enumerate(names)}
    first, count = (0, INPUTS) if whole else (INPUTS // 2, INPUTS // 2)
    share = Slots((Slot("0", ROWS - 64, 64, 0), Slot("1", 0, ROWS, 64)), ROWS + 64, first, count)
    has_blocks = isinstance(native, GgmlBlocks)
    numbers = {name: one.format.blocks(one) if has_blocks else one.format.unpack(one) for name, one in parts.items()}
    got = fusing.fused_native(native, ("0", "1"), numbers, share, CPU)
    want = torch.cat((parts["0"].values[-64:], parts["1"].values))[:, first : first + count]
    return close(got.restored(), want) and (
        not isinstance(native, Groups) or close(pack_integers(got.whole(), CPU).restored(), want)
    )


def stored(name: str) -> Callable[[], bool]:
    return lambda: is_read(written(name), declared(name))


def in_blocks(kind: str, heads: int = 0) -> Callable[[], bool]:
    return lambda: is_read(blocks(kind, heads))


def fused(name: str, native: Native, other: str = "", *, whole: bool = False) -> Callable[[], bool]:
    return lambda: is_fused((name, other or name), native, whole=whole)


FP8_IN_BLOCKS = fused("blocks", E4M3("block", "dynamic"))
ORDERED = fused("gptq-64-ordered", Groups(4, 64, zeros=True, ordered=True), whole=True)


def edit(function: Callable[..., Any], old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault: `new` instead of `old` in the source of a function."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{function.__qualname__} does not have {old!r} once"
        changed: dict[str, Any] = {}
        exec(source.replace(old, new), function.__globals__, changed)
        patch.setattr(function, "__code__", changed[function.__name__].__code__)

    return plant


def constant(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault: another value of a constant, or of an entry of a table."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        if isinstance(owner, dict):
            patch.setitem(owner, name, value)
        else:
            patch.setattr(owner, name, value)

    return plant


# Fault → comparison that must fail, change of the code.
FAULTS: dict[str, tuple[Callable[[], bool], Callable[[pytest.MonkeyPatch], None]]] = {
    # integers
    "halves of a byte swapped": (
        stored("gptq-128"),
        edit(stored_codes._octets, "(octets & 15, octets >> 4)", "(octets >> 4, octets & 15)"),
    ),
    "parts of a byte of 2 bits in reverse": (
        stored("gptq-2"),
        edit(integers.unpacked, "for at in range(0, 8, bits)", "for at in range(8 - bits, -1, -bits)"),
    ),
    "number of 3 bits shifted at the end of a word": (
        stored("gptq-3"),
        edit(integers.unpacked, "(WORD - low)", "(WORD - 1 - low)"),
    ),
    "number of 3 bits ends in its own word": (
        stored("gptq-3"),
        edit(integers.unpacked, "parts[:, :, at + 1]", "parts[:, :, at]"),
    ),
    "zero points of gptq one too small": (stored("gptq-32-zeros"), constant(gptq.VERSIONS, "gptq", 0)),
    "zero points of gptq_v2 one too large": (stored("gptq-v2-64-zeros"), constant(gptq.VERSIONS, "gptq_v2", 1)),
    "scales of gptq transposed": (
        stored("gptq-32-zeros"),
        edit(gptq.Gptq.numbers, 'read("scales").T', 'read("scales").reshape(matrix.rows, -1)'),
    ),
    "act order ignored": (
        stored("gptq-64-ordered"),
        edit(integers.unsigned, "_octets(values)[:, order.long()]", "_octets(values)"),
    ),
    "act order of a dequantized matrix ignored": (
        stored("gptq-8-ordered-zeros"),
        edit(integers._groups_of, "groups = matrix.read(index).long()", "return torch.arange(matrix.inputs) // 64"),
    ),
    "act order inverted": (
        stored("gptq-64-ordered"),
        edit(quantisation._in_order, "inputs[:, order.long()] = columns", "inputs = columns[:, order.long()]"),
    ),
    "act order lost on a GPU": (
        stored("gptq-64-ordered"),
        edit(
            gpu_integers.pack_integers, "None if weight.order is None else weight.order.to(device, copy=True)", "None"
        ),
    ),
    "act order of a fused matrix ignored": (
        ORDERED,
        edit(quantisation.joined, "zeros, first.group, first.order)", "zeros, first.group, None)"),
    ),
    "middle of 2 bits kept in 4": (
        stored("gptq-2"),
        edit(integers.unsigned, "values + ((1 << (FEW - 1)) - middle)", "values"),
    ),
    "zero points of 5 bits ignored": (
        stored("gptq-5-zeros"),
        edit(
            integers.unsigned,
            "middle if zeros is None else zeros.repeat_interleave",
            "middle if zeros is not None else zeros.repeat_interleave",
        ),
    ),
    "outputs of an awq word in the inverse order": (
        stored("awq-64"),
        constant(stored_codes, "ACROSS", (0, 4, 1, 5, 2, 6, 3, 7)),
    ),
    "padding of awq-gemv read as zero points": (
        stored("awq-gemv-128"),
        edit(
            awq.Gemv.numbers,
            'unpacked(matrix.read("qzeros"), 4)[:, :groups]',
            'unpacked(matrix.read("qzeros"), 4)[:, -groups:]',
        ),
    ),
    "halves of a byte of Marlin swapped": (
        stored("marlin"),
        edit(marlin.Marlin.numbers, "(octets & 15, octets >> 4)", "(octets >> 4, octets & 15)"),
    ),
    "scales of Marlin in the order of channels": (
        stored("marlin"),
        constant(marlin, "GROUP_SCALES", marlin.CHANNEL_SCALES),
    ),
    "tiles of Marlin transposed": (
        stored("marlin-channel"),
        edit(marlin.Marlin.numbers, "tiles.permute(1, 3, 0, 2)", "tiles.permute(1, 2, 0, 3)"),
    ),
    "zero points of compressed-tensors transposed": (
        stored("packed-32-zeros"),
        edit(compressed_tensors.Packed.numbers, "[:, : matrix.rows].T", "[:, : matrix.rows].reshape(matrix.rows, -1)"),
    ),
    "middle of int8 off by one": (
        stored("int8-groups"),
        edit(
            StoredCodes.unpacked,
            "return self.data.flatten(1)",
            "return self.data.flatten(1) - 1",
        ),
    ),
    "middle of zero points of int8 off by one": (
        stored("int8-zeros"),
        edit(compressed_tensors.Int8.numbers, ".to(torch.int16) + 128", ".to(torch.int16) + 127"),
    ),
    "sign of stored int8 kept in unsigned integers": (
        stored("int8-zeros"),
        edit(StoredCodes.unsigned, "view(torch.uint8) ^ 128", "view(torch.uint8)"),
    ),
    "zero points of torchao without the middle": (
        stored("torchao-int4-zeros"),
        edit(torchao.AoIntegers.numbers, ".view(matrix.rows, -1) + middle", ".view(matrix.rows, -1)"),
    ),
    "int8 of Quark without the middle": (
        stored("quark-int8"),
        edit(quark.QuarkInt8.numbers, 'signed_codes(matrix.read("weight"))', 'matrix.read("weight").view(torch.uint8)'),
    ),
    "groups of a rank begin at the first input": (
        fused("gptq-32-zeros", Groups(4, 32, zeros=True)),
        edit(fusing._cut, "start = 0 if channels else first // part.group", "start = 0"),
    ),
    "zero points of a rank are those of its first groups": (
        fused("gptq-32-zeros", Groups(4, 32, zeros=True)),
        edit(fusing._cut, "part.zeros[rows, groups]", "part.zeros[rows, : part.zeros[rows, groups].shape[1]]"),
    ),
    "zero points of a symmetric source one too small": (
        fused("awq-gemv-128", Groups(4, 128, zeros=True), "gptq-128"),
        constant(quantisation, "MIDDLE", 7),
    ),
    "halves of a packed byte swapped on a GPU": (
        stored("awq-64"),
        edit(integer_matmul.packed, "low | high << 4", "high | low << 4"),
    ),
    "neighbours instead of halves packed on a GPU": (
        stored("awq-64"),
        edit(integer_matmul.packed, "(1, (-1, 2, half)).unbind(2)", "(1, (-1, half, 2)).unbind(3)"),
    ),
    "zero points lost on a GPU": (
        stored("awq-64"),
        edit(gpu_integers.pack_integers, "weight.zeros if isinstance(weight, Int4Weight) else None", "None"),
    ),
    # floats
    "halves of e2m1 swapped": (stored("nvfp4"), edit(floats.doubled, "(raw & 15, raw >> 4)", "(raw >> 4, raw & 15)")),
    "e2m1 without its sign": (stored("nvfp4"), constant(floats, "DOUBLED", tuple(map(abs, floats.DOUBLED)))),
    "e2m1 twice as large": (
        stored("modelopt-nvfp4"),
        edit(floats.Floats.dequantize, ".float() / 2", ".float()"),
    ),
    "e8m0 off by one power": (
        stored("mxfp8"),
        edit(floats.power_of_two, "raw.view(torch.float8_e8m0fnu)", "(raw - 1).view(torch.float8_e8m0fnu)"),
    ),
    "numbers of MXFP4 16 bytes apart": (
        stored("mxfp4"),
        edit(
            floats.mx_blocks,
            "codes[:, :, : MX_GROUP // 2] | codes[:, :, MX_GROUP // 2 :]",
            "codes[:, :, ::2] | codes[:, :, 1::2]",
        ),
    ),
    "divisor of NVFP4 is a factor": (
        stored("nvfp4"),
        edit(floats.Floats.dequantize, "factors / whole if self.divides else factors * whole", "factors * whole"),
    ),
    "scale of the matrix applied twice": (
        stored("modelopt-nvfp4"),
        edit(floats.Floats.dequantize, "factors * whole", "factors * whole * whole"),
    ),
    "factors of the inputs ignored": (
        stored("modelopt-nvfp4-awq"),
        edit(floats.Floats.dequantize, "if self.input_factor and", "if not self.input_factor and"),
    ),
    "scales of floats in the order of inputs": (
        stored("blocks-64"),
        edit(
            floats.spread,
            "found.repeat_interleave(inputs, 1)[:, : matrix.inputs]",
            "found.repeat(1, inputs)[:, : matrix.inputs]",
        ),
    ),
    "scales of fp8 blocks transposed": (
        stored("blocks"),
        edit(fp8.Fp8.unpack, "scales.view(-1, words(matrix.inputs, FP8_BLOCK))", "scales.t().contiguous()"),
    ),
    "scales of a rank are those of its first rows": (
        FP8_IN_BLOCKS,
        edit(
            fusing._fused_fp8,
            "torch.arange(piece.start, piece.start + piece.rows, unit",
            "torch.arange(0, piece.rows, unit",
        ),
    ),
    "scales of a rank are those of its first inputs": (
        FP8_IN_BLOCKS,
        edit(fusing._fused_fp8, "first_group : first_group + groups", ":groups"),
    ),
    # codes of bitsandbytes and hqq
    "low half of NF4 first": (
        stored("bnb-nf4"),
        edit(bitsandbytes.FourBits.dequantize, "(raw >> 4, raw & 15)", "(raw & 15, raw >> 4)"),
    ),
    "offset of nested scales ignored": (
        stored("bnb-nf4-double"),
        edit(bitsandbytes.FourBits._scales, ' + state["nested_offset"]', ""),
    ),
    "nested scales applied twice": (
        stored("bnb-nf4-double"),
        edit(bitsandbytes.FourBits._scales, "table[scales.int()] * wide", "table[scales.int()] * wide * wide"),
    ),
    "LLM.int8 divided by 128": (stored("bnb-int8"), constant(bitsandbytes, "LARGEST", 128)),
    "parts of hqq in reverse": (
        stored("hqq-4"),
        edit(hqq.Hqq.dequantize, "(width * (count - 1 - part))", "(width * part)"),
    ),
    "zero of hqq subtracted from the product": (
        stored("hqq-4-axis-0"),
        edit(
            hqq.Hqq.dequantize,
            '(values - matrix.read("zero").float()) * matrix.read("scale").float()',
            'values * matrix.read("scale").float() - matrix.read("zero").float()',
        ),
    ),
    # blocks of ggml
    "rows of q permuted the wrong way": (
        in_blocks("Q8_0", heads=4),
        edit(ggml.Permuted.rows, "self.heads, -1, 2,", "self.heads, 2, -1,"),
    ),
    "neighbours instead of halves in Q4_0": (
        in_blocks("Q4_0"),
        edit(
            StoredCodes.unsigned,
            "torch.cat((self.data & 15, self.data >> 4), 2).flatten(1)",
            "torch.stack((self.data & 15, self.data >> 4), 3).flatten(1)",
        ),
    ),
    "scale of Q8_0 read behind the numbers": (
        in_blocks("Q8_0"),
        edit(ggml.Q8_0.integers, "raw[:, :, 2:]", "raw[:, :, :-2]"),
    ),
    "scales and minimums of Q4_K swapped": (
        in_blocks("Q4_K"),
        edit(block_codes._scales_and_minima, "torch.stack((scales, minima), 3)", "torch.stack((minima, scales), 3)"),
    ),
    "high bits of the last scales of Q5_K": (
        in_blocks("Q5_K"),
        edit(block_codes._scales_and_minima, "third & 15 | first >> 2 & 48", "third & 15 | second >> 2 & 48"),
    ),
    "nibbles of Q2_K swapped": (
        in_blocks("Q2_K"),
        edit(block_codes._terms, "(stored & 15, stored >> 4)", "(stored >> 4, stored & 15)"),
    ),
    "third bit of Q3_K inverted": (
        in_blocks("Q3_K"),
        edit(block_codes._q3_k, "_fields(raw[:, :, :32], 1, 32) << 2", "(1 - _fields(raw[:, :, :32], 1, 32)) << 2"),
    ),
    "high bits of Q6_K in other bytes": (
        in_blocks("Q6_K"),
        edit(block_codes._q6_k, "_fields(raw[:, :, 128:192], 2, 32)", "_fields(raw[:, :, 128:192], 2, 64)"),
    ),
    "scales of Q6_K without a sign": (in_blocks("Q6_K"), edit(block_codes._q6_k, ".view(torch.int8)", "")),
    "scales of IQ4_XS off by one": (
        in_blocks("IQ4_XS"),
        edit(block_codes._iq4_xs, ".to(torch.int8) - 32", ".to(torch.int8) - 31"),
    ),
    "fifth bit of Q5_0 in the order of bytes": (
        in_blocks("Q5_0"),
        edit(block_codes._fifth, "for at in range(8)], 3)", "for at in range(8)], 2)"),
    ),
    "table of IQ4_NL": (in_blocks("IQ4_NL"), constant(PLANES, "IQ4_NL", PLANES["IQ4_NL"]._replace(table=DOUBLED))),
    "powers of MXFP4 off by one": (in_blocks("MXFP4"), edit(block_codes.power_of_two, "(e - 1) << 23", "e << 23")),
    "minimums of Q4_K added": (
        in_blocks("Q4_K"),
        edit(
            block_codes._terms,
            "-terms[:, :, 1] if found.units is not None",
            "terms[:, :, 1] if found.units is not None",
        ),
    ),
    "high bits of a plane in the low ones": (
        in_blocks("Q5_1"),
        edit(planes.to_planes, "codes >> layout.low, layout.high", "codes, layout.high"),
    ),
    "scales of planes in the order of outputs": (
        stored("bnb-nf4"),
        edit(
            planes.to_planes,
            "found.scales[:, :groups].permute(1, 2, 0).contiguous()",
            "found.scales[:, :groups].contiguous().view(groups, -1, len(blocks))",
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_right, plant = FAULTS[fault]
    assert is_right(), "the code is wrong without the fault"
    with monkeypatch.context() as patch, suppress(CheckpointError):
        plant(patch)
        assert not is_right()


def test_fused_sources_in_different_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, one order would be used for both."""
    one = written("gptq-64-ordered")
    other = replace(one.format.unpack(one), order=torch.arange(INPUTS, dtype=torch.int32))
    share = Slots((Slot("0", 0, ROWS, 0), Slot("1", 0, ROWS, ROWS)), 2 * ROWS, 0, INPUTS)
    numbers = {"0": one.format.unpack(one), "1": other}
    native = Groups(4, 64, zeros=True, ordered=True)
    with pytest.raises(CheckpointError, match="in different orders"):
        fusing.fused_native(native, ("0", "1"), numbers, share, CPU)
    edit(fusing._joined, "any(not _same(piece.order, pieces[0].order) for piece in pieces)", "False")(monkeypatch)
    got = fusing.fused_native(native, ("0", "1"), numbers, share, CPU).restored()
    assert not close(got[ROWS:], other.restored())


def test_every_type_of_blocks_is_compared() -> None:
    kinds = {kind for kind in LAYOUTS if kind != "INT6"}
    assert all(is_read(blocks(kind)) for kind in kinds)
