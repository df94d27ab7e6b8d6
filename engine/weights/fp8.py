"""fp8 projections of a checkpoint: dequantized to float32, or as a rank's share of a fused fp8 matrix.

engine/models/schemes.py defines the tensors. In a fused matrix, each source keeps its scales: scales per output or per
matrix become one per output; block scales have the granularity at which rows of the sources are aligned (`fp8_unit`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.models.ranks import fp8_unit
from engine.models.schemes import FP8_BLOCK, Scheme
from engine.models.sources import join
from engine.weights.slot import Slots
from kernels.fp8 import Fp8Weight

Read = Callable[[str], Tensor]


def restored(read: Read, path: str, scheme: Scheme) -> Tensor:
    """Return scale · q, [outputs, inputs] float32."""
    values, scales = read(f"{path}.weight").float(), read(f"{path}.{scheme.named[0]}").float()
    if scheme.scales == "block":
        rows, inputs = values.shape
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
    return values.mul_(scales)


def fused_fp8(read: Read, path: str, matrix: Slots, schemes: Mapping[str, Scheme], device: torch.device) -> Fp8Weight:
    """Return a rank's share of a fused matrix, whose sources have compatible schemes. Raises CheckpointError if the
    share would divide blocks of inputs."""
    names = [join(path, piece.source) for piece in matrix.pieces]
    first = schemes[names[0]]
    values = torch.empty((matrix.rows, matrix.inputs), dtype=torch.float8_e4m3fn, device=device)
    inputs = slice(matrix.first_input, matrix.first_input + matrix.inputs)
    for name, piece in zip(names, matrix.pieces, strict=True):
        source = read(f"{name}.weight")
        values[piece.at : piece.at + piece.rows].copy_(source[piece.start : piece.start + piece.rows, inputs])
    if first.scales == "block":
        _check_inputs(names[0], matrix, read(f"{names[0]}.weight").shape[1])
        unit = fp8_unit((piece.start, piece.at) for piece in matrix.pieces)
        scales = _of_blocks(read, names, matrix, first.named[0], unit, device)
    else:
        unit, scales = 1, _of_outputs(read, names, matrix, schemes, device)
    static_scale = None
    if first.inputs == "static":
        # One scale for all sources, because they read the same rows: the largest one.
        found = [read(f"{name}.{schemes[name].named[1]}").float().max() for name in dict.fromkeys(names)]
        static_scale = torch.stack(found).amax().view(1).to(device)
    return Fp8Weight(values, scales, unit, first.inputs is not None, static_scale)


def _of_outputs(
    read: Read, names: Sequence[str], matrix: Slots, schemes: Mapping[str, Scheme], device: torch.device
) -> Tensor:
    scales = torch.empty((matrix.rows, 1), device=device)
    for name, piece in zip(names, matrix.pieces, strict=True):
        source = read(f"{name}.{schemes[name].named[0]}").float()
        if schemes[name].scales == "channel":
            source = source[piece.start : piece.start + piece.rows]
        scales[piece.at : piece.at + piece.rows].copy_(source)
    return scales


def _of_blocks(read: Read, names: Sequence[str], matrix: Slots, named: str, unit: int, device: torch.device) -> Tensor:
    first, groups = matrix.first_input // FP8_BLOCK, -(-matrix.inputs // FP8_BLOCK)
    scales = torch.empty((-(-matrix.rows // unit), groups), device=device)
    for name, piece in zip(names, matrix.pieces, strict=True):
        source = read(f"{name}.{named}").float()[:, first : first + groups]
        # The source's block of each unit of the piece.
        blocks = torch.arange(piece.start, piece.start + piece.rows, unit, device=source.device) // FP8_BLOCK
        scales[piece.at // unit : -(-(piece.at + piece.rows) // unit)].copy_(source[blocks])
    return scales


def _check_inputs(name: str, matrix: Slots, whole: int) -> None:
    if matrix.inputs != whole and matrix.inputs % FP8_BLOCK:
        raise CheckpointError(
            f"{name}: a rank's {matrix.inputs} of {whole} inputs are not whole blocks of {FP8_BLOCK}; lower "
            "parallelism.tensor, or set hardware.kernels to torch"
        )
