"""Integers of 2 to 8 bits with a scale for each output and group of inputs: w = scale · (q - zero).

Compiled kernels multiply by 4 and 8 bits (`product`). Fewer bits are kept in 4, without zero points as q + 8 - middle.
5 to 7 bits are kept as q - zero in 8. Zero points of 8 bits and groups that are not multiples of 32 inputs have no
kernel, so these weights are dequantized.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from engine.formats.format import GROUP_MULTIPLE, Format, StoredMatrix
from engine.formats.native import CHANNEL_GROUP, Groups

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.quantisation import Int4Weight, Int8Weight
    from kernels.stored_codes import StoredCodes

FEW, MANY = 4, 8  # bits of the kernels
WORD = 32  # bits


class Numbers(NamedTuple):
    """The integers of a matrix as a checkpoint stores them."""

    values: "Tensor | StoredCodes"  # [outputs, inputs] uint8
    scales: "Tensor"  # [outputs, groups]
    zeros: "Tensor | None"  # [outputs, groups] int16, None for the middle of the range


def product(stored: Groups) -> Groups | None:
    """Return the product that multiplies by these integers exactly, or None."""
    if stored.group is not None and stored.group % GROUP_MULTIPLE:
        return None
    if stored.bits <= FEW:
        return replace(stored, bits=FEW)
    if stored.bits == MANY and stored.zeros:
        return None
    return replace(stored, bits=MANY, zeros=False)


@dataclass(frozen=True)
class Integers(Format):
    """A format of integers. Subclasses read `numbers`."""

    stored: Groups = Groups(FEW, None)

    index: ClassVar[str] = ""  # optional tensor with the group of each input

    @classmethod
    def of(cls, stored: Groups, **more: Any) -> Self:
        """Return the format with the product for these integers."""
        return cls(native=product(stored), stored=stored, **more)

    def __str__(self) -> str:
        return str(self.stored)

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        """Return the integers, scales and zero points of a matrix."""
        raise NotImplementedError

    def unpack(self, matrix: StoredMatrix) -> Any:
        from kernels.quantisation import Int8Weight

        found = unsigned(matrix, self.stored, self.numbers(matrix), self.index)
        if self.stored.inputs is None:
            return found
        assert isinstance(found, Int8Weight), "activations are rounded to int8 for weights of 8 bits"
        return replace(found, rounds=True, static_scale=self.static_scale(matrix))

    def static_scale(self, matrix: StoredMatrix) -> "Tensor | None":
        """Return the scale of the activations, [1] float32, None if each token has one of its own."""
        return None

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        if self.native is not None:
            return super().dequantize(matrix)
        values, scales, zeros = self.numbers(matrix)
        groups = _groups_of(matrix, self.stored, self.index)
        middle = 1 << (self.stored.bits - 1)
        shifted = _octets(values).float() - (middle if zeros is None else zeros.float()[:, groups])
        return shifted.mul_(scales.float()[:, groups])


def _groups_of(matrix: StoredMatrix, stored: Groups, index: str) -> "Tensor":
    """Return the group of each input, [inputs] int64."""
    import torch

    count = -(-matrix.inputs // (stored.group or matrix.inputs))
    if stored.group is None or not index or not matrix.has(index):
        return torch.arange(matrix.inputs) // (stored.group or matrix.inputs)
    groups = matrix.read(index).long()
    if not bool(((groups >= 0) & (groups < count)).all()):
        raise matrix.error(f"{matrix.path}.{index} has groups outside of 0 to {count - 1}")
    return groups


def codes_of(words: "Tensor", bits: int, inputs: int) -> "Tensor | StoredCodes":
    """Return the integers of [outputs, words] int32, a stream of bits with the lowest bits of a word first. Integers
    of 4 and 8 bits stay packed."""
    from kernels.stored_codes import StoredCodes

    return StoredCodes(words, "words", bits, inputs) if bits in (FEW, MANY) else unpacked(words, bits)[:, :inputs]


def signed_codes(values: "Tensor") -> "StoredCodes":
    """Return the integers of [outputs, inputs] int8."""
    from kernels.stored_codes import StoredCodes

    return StoredCodes(values, "signed", MANY, values.shape[1])


def _octets(values: "Tensor | StoredCodes") -> "Tensor":
    """Return unsigned integers, [outputs, inputs] uint8."""
    from kernels.stored_codes import StoredCodes

    return values.unsigned() if isinstance(values, StoredCodes) else values


def unpacked(words: "Tensor", bits: int) -> "Tensor":
    """Unpack [rows, words] int32 to [rows, numbers] uint8: a stream of bits, the lowest bits of a word first."""
    import torch

    octets = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), -1)  # one row or column: any stride
    if bits == MANY:
        return octets
    if bits in (2, FEW):
        return torch.stack([octets >> at & ((1 << bits) - 1) for at in range(0, 8, bits)], 2).flatten(1)
    # 32 numbers in `bits` words. A number may begin in one word and end in the next.
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).long() & (2**WORD - 1)
    parts = padded.unflatten(1, (-1, bits))
    parts = torch.nn.functional.pad(parts, (0, 1))
    starts = [(bits * number // WORD, bits * number % WORD) for number in range(WORD)]
    numbers = [(parts[:, :, at] >> low) | (parts[:, :, at + 1] << (WORD - low)) for at, low in starts]
    return (torch.stack(numbers, 2) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def packed_words(values: "Tensor", bits: int) -> "Tensor":
    """Pack [rows, numbers] uint8 of 4 or 8 bits to [rows, words] int32, the first number in the lowest bits: the
    inverse of `unpacked`."""
    import torch

    each = WORD // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % each))
    if bits == FEW:
        pairs = padded.view(len(padded), -1, 2)
        padded = pairs[:, :, 0] | pairs[:, :, 1] << FEW
    return padded.contiguous().view(torch.int32)


def words_of(count: int, bits: int) -> int:
    """Return the words for `count` numbers."""
    return -(-count * bits // WORD)


def unsigned(matrix: StoredMatrix, stored: Groups, numbers: Numbers, index: str) -> "Int4Weight | Int8Weight":
    """Return the integers for the product of `stored`. index: optional tensor with the group of each input."""
    import torch

    from kernels.quantisation import Int4Weight
    from kernels.stored_codes import StoredCodes

    (values, scales, zeros), bits = numbers, stored.bits
    middle = 1 << (bits - 1)
    if zeros is not None and not stored.zeros and bool((zeros == middle).all()):
        zeros = None
    order = _order(matrix, stored, index) if index else None
    if order is not None:
        values = _octets(values)[:, order.long()]
    if bits > FEW:
        if zeros is not None and bits == MANY:
            raise matrix.error(
                f"{matrix.path} has zero points other than {middle}, though its settings say that it is symmetric; "
                "set that to false if the file is right"
            )
        if isinstance(values, StoredCodes):
            return signed(values, scales, stored.group)
        if zeros is None and bits == MANY:
            return signed((values ^ middle).view(torch.int8), scales, stored.group, order)
        shift = middle if zeros is None else zeros.repeat_interleave(stored.group or values.shape[1], 1)
        shift = shift if isinstance(shift, int) else shift[:, : values.shape[1]]
        return signed((values.to(torch.int16) - shift).to(torch.int8), scales, stored.group, order)
    group = stored.group
    if group is None:
        group, groups = CHANNEL_GROUP, -(-values.shape[1] // CHANNEL_GROUP)
        scales = scales.expand(-1, groups)
        zeros = None if zeros is None else zeros.expand(-1, groups)
    kept = None if zeros is None else zeros.to(torch.uint8).contiguous()
    if isinstance(values, StoredCodes):
        return Int4Weight(values, scales.contiguous(), kept, group)
    if zeros is None and bits < FEW:
        values = values + ((1 << (FEW - 1)) - middle)
    return Int4Weight(values.contiguous(), scales.contiguous(), kept, group, order)


def signed(
    values: "Tensor | StoredCodes", scales: "Tensor", group: int | None, order: "Tensor | None" = None
) -> "Int8Weight":
    """Return integers of 8 bits. values: [outputs, inputs] int8. scales: [outputs, groups]."""
    from kernels.quantisation import Int8Weight
    from kernels.stored_codes import StoredCodes

    if group is None:
        group, scales = CHANNEL_GROUP, scales.expand(-1, -(-values.shape[1] // CHANNEL_GROUP))
    kept = values if isinstance(values, StoredCodes) else values.contiguous()
    return Int8Weight(kept, scales.contiguous(), group, order)


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
