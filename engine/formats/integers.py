"""Integers as kernels take them, from the tensors of a checkpoint: w = scale · (q - zero)."""

from typing import TYPE_CHECKING

from engine.formats.format import StoredMatrix
from engine.formats.native import CHANNEL_GROUP, Groups

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.quantisation import Int4Weight, Int8Weight

MIDDLE = {4: 8, 8: 128}  # zero point of unsigned integers without stored zero points


def unpacked(words: "Tensor", bits: int) -> "Tensor":
    """Unpack [rows, words] int32 to [rows, 32 / bits numbers per word, lowest bits first] uint8."""
    import torch

    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def unsigned(
    matrix: StoredMatrix, native: Groups, values: "Tensor", scales: "Tensor", zeros: "Tensor | None", index: str
) -> "Int4Weight | Int8Weight":
    """Return the integers of a matrix. values: [outputs, inputs] unsigned. scales, zeros: [outputs, groups]. index:
    optional tensor with the group of each input; "": none."""
    import torch

    from kernels.quantisation import Int4Weight

    middle = MIDDLE[native.bits]
    if zeros is not None and not native.zeros and bool((zeros == middle).all()):
        zeros = None
    order = _order(matrix, native, index) if index else None
    values = values if order is None else values[:, order.long()]
    if native.bits == 8:
        if zeros is not None:
            raise matrix.error(
                f"{matrix.path} has zero points other than {middle}, though its settings say that it is symmetric; "
                "8 bits are supported without"
            )
        return signed((values.to(torch.int16) - middle).to(torch.int8), scales, native.group, order)
    group = native.group
    if group is None:
        group, groups = CHANNEL_GROUP, -(-values.shape[1] // CHANNEL_GROUP)
        scales = scales.expand(-1, groups)
        zeros = None if zeros is None else zeros.expand(-1, groups)
    kept = None if zeros is None else zeros.to(torch.uint8).contiguous()
    return Int4Weight(values.contiguous(), scales.contiguous(), kept, group, order)


def signed(values: "Tensor", scales: "Tensor", group: int | None, order: "Tensor | None" = None) -> "Int8Weight":
    """Return integers of 8 bits. values: [outputs, inputs] int8. scales: [outputs, groups]."""
    from kernels.quantisation import Int8Weight

    if group is None:
        group, scales = CHANNEL_GROUP, scales.expand(-1, -(-values.shape[1] // CHANNEL_GROUP))
    return Int8Weight(values.contiguous(), scales.contiguous(), group, order)


def _order(matrix: StoredMatrix, native: Groups, index: str) -> "Tensor | None":
    """Return the inputs in group order, [inputs] int32; None if groups are contiguous or there is only one."""
    import torch

    if native.group is None or not matrix.has(index):
        return None
    groups = matrix.read(index).long()
    order = groups.argsort(stable=True)
    wanted = torch.arange(matrix.inputs) // native.group
    if not torch.equal(groups[order], wanted):
        raise matrix.error(
            f"{matrix.path}.{index} does not put {native.group} inputs in each group, which is not supported"
        )
    if torch.equal(groups, wanted):
        return None
    if not native.ordered:
        raise matrix.error(
            f"{matrix.path}.{index} has groups that are not contiguous, but quantization_config says desc_act: false; "
            "set it to true if the file is right"
        )
    return order.to(torch.int32)
