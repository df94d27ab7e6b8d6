"""The projection layer: fused, divided among ranks by rows or inputs, and packed for the kernel that multiplies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.api.config import EmbeddingBits, WeightBits
from engine.api.errors import CheckpointError
from engine.distributed.world import World
from engine.formats.load_time import LOAD_FORMATS
from engine.formats.native import Executor, Role
from engine.lowering.footprint import LARGE_GROUP
from engine.models.parts import Linear
from engine.models.sources import join
from engine.weights.fused import NativeWeight
from engine.weights.packed import PackedFile
from engine.weights.quantized import QuantizedWeights
from engine.weights.slot import Slots, fill, fused, slots, stored_dtype, stored_rows
from kernels.block_weights import PlaneWeight, SegmentedWeight, pack_blocks
from kernels.cpu.library import Tiling
from kernels.cpu.memory import Arena
from kernels.cpu.packing import Packed, Pieces, Segments
from kernels.cpu.packing import Weight as MatrixToPack
from kernels.cpu.packing import pack as pack_for
from kernels.cpu.program import Team
from kernels.e4m3 import Rounded, Rounding
from kernels.fp8 import Fp8Experts, Fp8Products, Fp8Weight
from kernels.ggml_blocks import BlockWeight
from kernels.integer_matmul import MIDDLE
from kernels.integers import IntegerWeight, pack_integers
from kernels.joined import Joined
from kernels.linear import linear, linear_fp32, matmul, pack
from kernels.quantisation import Int4Weight, Int8Weight

Read = Callable[[str], Tensor]
Unrounded = IntegerWeight | PlaneWeight | SegmentedWeight  # packed, multiplied by Triton kernels
OnDevice = Tensor | Fp8Weight | Unrounded  # as torch and Triton multiply by it
Weight = OnDevice | Packed | Segments  # a packed matrix


@dataclass(frozen=True)
class Target:
    """Target for which weights are loaded."""

    dtype: torch.dtype  # of the activations
    device: torch.device
    team: Team | None = None  # threads of the compiled kernels; None: torch or Triton multiplies
    bits: WeightBits = "stored"  # format to which matrices are quantized while they are loaded
    group: int = LARGE_GROUP  # inputs that share a scale of matrices quantized at load
    head: WeightBits = "stored"  # format to which the head is quantized
    head_group: int = LARGE_GROUP
    embedding: EmbeddingBits = "stored"  # format to which the token embedding is quantized
    known: PackedFile | None = None  # cache of matrices that were quantized and packed before
    invariant: bool = False
    """Triton multiplies, so that the sums of a row do not depend on the other rows. Otherwise the library multiplies,
    which selects its algorithm by size."""
    stacked: bool = False  # the experts of a layer are stacked in one tensor, for kernels that take all of them
    quantized: QuantizedWeights | None = None  # of a quantized checkpoint
    fp8: Fp8Products | None = None
    """How Triton kernels multiply by fp8 matrices; None: torch or compiled kernels multiply."""
    exact: bool = False  # the matrix is exempt from bf16 arithmetic of compiled kernels
    arena: Arena = field(default_factory=Arena)  # memory of packed weights

    def multiply(self, x: Tensor | Rounded, weight: OnDevice, bias: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] in the activations' type. x: [rows, inputs], quantized only as `rounding` specifies.
        weight: from `pack`."""
        if isinstance(weight, Fp8Weight):
            assert self.fp8 is not None, "fp8 weights need kernels that multiply by them"
            return self.fp8.multiply(x, weight, bias, self.dtype)
        assert isinstance(x, Tensor), "rows are quantized only for fp8 weights"
        if isinstance(weight, Unrounded):
            return weight.multiply(x, bias, self.dtype, by_size=not self.invariant)
        return matmul(x, weight, bias) if self.invariant else linear(x, weight, bias)

    def multiply_fp32(self, x: Tensor, weight: Tensor | Unrounded, bias: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] in fp32."""
        if isinstance(weight, Unrounded):
            return weight.multiply(x, bias, torch.float32, by_size=not self.invariant)
        return matmul(x, weight, bias, torch.float32) if self.invariant else linear_fp32(x, weight, bias)

    @property
    def executor(self) -> Executor:
        return "compiled" if self.team is not None else "torch" if self.fp8 is None else "triton"

    def native(self, path: str, matrix: Slots, role: Role) -> Packed | Segments | Fp8Weight | Unrounded | None:
        """Return the matrix of these sources if kernels multiply by the checkpoint's numbers, else None."""
        found: NativeWeight | Joined | Iterator[NativeWeight | Joined] | None = None
        if self.quantized is not None:
            found = self.quantized.native(path, matrix, self.executor, self.device, role)
        if found is None or isinstance(found, Fp8Weight):
            return found
        # map keeps no reference to a segment, so the numbers of one are in memory at a time.
        if isinstance(found, Iterator):
            if self.team is None:
                return SegmentedWeight(tuple(map(self._unrounded, found)))
            return Segments(tuple(map(self._packed_native, found)))
        return self._unrounded(found) if self.team is None else self._packed_native(found)

    def _unrounded(self, weight: NativeWeight | Joined) -> IntegerWeight | PlaneWeight:
        if isinstance(weight, Joined):
            weight = weight.whole()
        assert not isinstance(weight, Fp8Weight), "fp8 is not packed"
        if isinstance(weight, BlockWeight):
            return pack_blocks(weight, self.device)
        return pack_integers(weight, self.device)

    def _packed_native(self, weight: NativeWeight | Joined) -> Packed:
        assert self.team is not None, "only compiled kernels pack"
        assert not isinstance(weight, Fp8Weight), "compiled kernels have no products of fp8"
        return self._packed(weight, self.team.tiling)

    def stored_dtype(self, read: Read, path: str, matrix: Slots) -> torch.dtype:
        """Return the type in which the checkpoint stores all sources of a weight; float32 if they differ or are
        dequantized."""
        names = (join(path, piece.source) for piece in matrix.pieces)
        if self.quantized is not None and any(map(self.quantized.restores, names)):
            return torch.float32
        return stored_dtype(read, path, matrix)

    def pack(self, name: str, matrix: Tensor | Pieces) -> Weight:
        """Return the packed matrix [outputs, inputs] of this name, of the type that the checkpoint has."""
        format = LOAD_FORMATS.get(self.bits)
        if format is None:
            if self.team is None:
                weight = self._whole(matrix, self.dtype)
                return weight if self.invariant else pack(weight)
            tiling = self.team.tiling.exact if self.exact else self.team.tiling
            # Compiled kernels widen bf16 as they read it, which halves the bytes and is exact.
            kept = torch.bfloat16 if tiling.bf16 or matrix.dtype == torch.bfloat16 else self.dtype
            return self._packed(replace(matrix, dtype=kept) if isinstance(matrix, Pieces) else matrix.to(kept), tiling)
        if self.team is None:
            made: Fp8Weight | Int4Weight | Int8Weight = format.quantize(self._whole(matrix, matrix.dtype), self.group)
            return made if isinstance(made, Fp8Weight) else pack_integers(made, self.device)
        known = self.known.get(name) if self.known is not None else None
        if known is None:
            weight = self._whole(matrix, matrix.dtype)
            known = self._packed(format.quantize(weight, self.group), self.team.tiling)
            if self.known is not None:
                self.known.put(name, known)
            return known
        return replace(known, data=self.arena.copy(known.data))

    def _whole(self, matrix: Tensor | Pieces, dtype: torch.dtype) -> Tensor:
        if isinstance(matrix, Pieces):
            return matrix.whole(dtype, self.device)
        return matrix.to(self.device, dtype)

    def pack_exact(self, weight: Tensor) -> Packed:
        """Return a matrix [outputs, inputs] for compiled kernels, exempt from quantization and bf16 arithmetic."""
        assert self.team is not None, "only compiled kernels pack"
        return self._packed(weight, self.team.tiling.exact)

    def pack_wide(self, weight: Tensor) -> Packed:
        """Return a bfloat16 matrix [outputs, inputs] for compiled kernels, exempt from quantization."""
        assert self.team is not None, "only compiled kernels pack"
        return self._packed(weight, self.team.tiling)

    def _packed(self, weight: MatrixToPack, tiling: Tiling) -> Packed:
        return pack_for(weight, tiling, None, self.arena.empty)


def mixed_experts() -> CheckpointError:
    return CheckpointError("the experts of a layer are quantized differently; set hardware.kernels to torch")


class ExpertStack:
    """Memory of `count` matrices of the same shape, [count, rows, inputs], or of their packed numbers, and their
    biases, [count, rows]. Allocated on first use."""

    whole: Tensor | None = None
    integers: IntegerWeight | None = None
    """The packed matrices instead: each tensor has the experts along its first axis."""
    blocks: PlaneWeight | None = None  # the matrices in blocks of ggml instead
    fp8: Fp8Experts | None = None
    biases: Tensor | None = None

    def __init__(self, count: int) -> None:
        self._count = count

    def place(self, number: int, matrix: Slots, target: Target) -> Tensor:
        """Return the memory of one matrix, [rows, inputs], to be filled."""
        if self.whole is None:
            self._check_new()
            shape = self._count, matrix.rows, matrix.inputs
            self.whole = torch.empty(shape, dtype=target.dtype, device=target.device)
        return self.whole[number]

    def put_fp8(self, number: int, matrix: Fp8Weight) -> Fp8Weight:
        """Store an fp8 matrix, see `put`."""
        if self.fp8 is None:
            self._check_new()
            self.fp8 = Fp8Experts.empty(self._count, matrix)
        placed = self.fp8.put(number, matrix)
        if placed is None:
            raise mixed_experts()
        return placed

    def put_blocks(self, number: int, matrix: PlaneWeight) -> PlaneWeight:
        """Store a matrix in blocks of ggml, see `put`."""
        if self.blocks is None:
            self._check_new()
            self.blocks = matrix.empty_stack(self._count)
        placed = self.blocks.put(number, matrix)
        if placed is None:
            raise mixed_experts()
        return placed

    def put(self, number: int, matrix: IntegerWeight) -> IntegerWeight:
        """Copy a packed matrix to its place, and return it there. Raises CheckpointError if the experts of a layer have
        several formats."""
        if self.integers is None:
            self._check_new()
            values, scales = (one.new_empty((self._count, *one.shape)) for one in (matrix.values, matrix.scales))
            static = None if matrix.static_scale is None else matrix.static_scale.new_empty(self._count)
            self.integers = replace(matrix, values=values, scales=scales, zeros=None, static_scale=static)
        stack = self.integers
        if (
            matrix.order is not None
            or any(getattr(stack, name) != getattr(matrix, name) for name in ("bits", "group", "inputs", "rounds"))
            or (stack.static_scale is None) != (matrix.static_scale is None)
        ):
            raise mixed_experts()
        if matrix.zeros is not None and stack.zeros is None:
            shape = self._count, *matrix.zeros.shape
            stack = self.integers = replace(stack, zeros=matrix.zeros.new_full(shape, MIDDLE[stack.bits]))
        stack.values[number] = matrix.values
        stack.scales[number] = matrix.scales
        if stack.zeros is not None and matrix.zeros is not None:
            stack.zeros[number] = matrix.zeros
        zeros, static = None if stack.zeros is None else stack.zeros[number], None
        if stack.static_scale is not None and matrix.static_scale is not None:
            static = stack.static_scale[number : number + 1].copy_(matrix.static_scale)
        own = {"values": stack.values[number], "scales": stack.scales[number], "zeros": zeros}
        return replace(stack, **own, static_scale=static)

    def _check_new(self) -> None:
        """Raise CheckpointError if the stack has matrices of another form."""
        if any(one is not None for one in (self.whole, self.integers, self.blocks, self.fp8)):
            raise mixed_experts()

    def place_bias(self, number: int, matrix: Slots, target: Target) -> Tensor:
        """Return the memory of one bias, [rows], to be filled."""
        if self.biases is None:
            self.biases = torch.empty((self._count, matrix.rows), dtype=target.dtype, device=target.device)
        return self.biases[number]


@dataclass(frozen=True)
class StackSlice:
    """Destination of a matrix if its target has `stacked` set."""

    stack: ExpertStack
    number: int


class LinearLayer:
    """y = x W^T (+ b) of one rank. For split "inputs", the ranks' products are summed before the bias is added.

    rounded=False: the weight is exempt from quantization and bf16 arithmetic. It is dequantized unless kernels multiply
    by the checkpoint's numbers everywhere. wide_rows: last outputs that compiled kernels keep in bfloat16 when they
    quantize the others at load."""

    weight: Weight  # [rows, inputs] of this rank, packed
    target: Target  # for which it was packed
    bias: Tensor | None = None

    def __init__(
        self,
        part: Linear,
        path: str,
        world: World,
        *,
        rounded: bool = True,
        stack_slice: StackSlice | None = None,
        wide_rows: int = 0,
    ) -> None:
        self.part, self.path, self.world, self._rounded, self._stack_slice = part, path, world, rounded, stack_slice
        self._wide_rows = wide_rows
        self.slots = slots(part, world)
        self.name = join(path, "+".join(row.source for row in part.rows))
        self._reduce = part.split == "inputs" and world.size > 1

    def load(self, read: Read, target: Target) -> None:
        """Load this rank's share of the sources."""
        self.target = target if self._rounded else replace(target, bits="stored", exact=True)
        if self._stack_slice is not None and target.stacked:
            self._load_stacked(self._stack_slice, read, target)
            return
        if self.part.bias:
            self.bias = fused(read, self.path, "bias", self.slots, target.dtype, target.device)
        role: Role = "exact" if self.target.exact else "expert" if self._stack_slice is not None else "projection"
        self.weight = self.target.native(self.path, self.slots, role) or self._packed(read)

    def _packed(self, read: Read) -> Weight:
        target, matrix = self.target, self._pieces(read)
        if not self._wide_rows or target.team is None or target.bits not in LOAD_FORMATS:
            return target.pack(self.name, matrix)
        first, whole = self.slots.rows - self._wide_rows, matrix.whole(matrix.dtype, target.device)
        narrow = target.pack(self.name, whole[:first])
        assert isinstance(narrow, Packed), "compiled kernels pack"
        return Segments((narrow, target.pack_wide(whole[first:].bfloat16())))

    def _pieces(self, read: Read) -> Pieces:
        stored = self.target.stored_dtype(read, self.path, self.slots)
        return Pieces(
            self.slots.rows, self.slots.inputs, stored, lambda: stored_rows(read, self.path, "weight", self.slots)
        )

    def _load_stacked(self, place: StackSlice, read: Read, target: Target) -> None:
        packed = target.native(self.path, self.slots, "expert")
        format = LOAD_FORMATS.get(target.bits)
        if packed is None and format is not None and "expert" in format.roles(target.executor):
            packed = target.pack(self.name, self._pieces(read))
        if packed is None:
            memory = place.stack.place(place.number, self.slots, target)
            self.weight = fill(memory, read, self.path, "weight", self.slots)
        elif isinstance(packed, Fp8Weight):
            self.weight = place.stack.put_fp8(place.number, packed)
        elif isinstance(packed, PlaneWeight):
            self.weight = place.stack.put_blocks(place.number, packed)
        else:
            assert isinstance(packed, IntegerWeight), "experts are stacked plain, in fp8, in integers or in blocks"
            self.weight = place.stack.put(place.number, packed)
        if self.part.bias:
            memory = place.stack.place_bias(place.number, self.slots, target)
            self.bias = fill(memory, read, self.path, "bias", self.slots)

    @property
    def own_bias(self) -> Tensor | None:
        """The bias that this rank adds to its products: if the ranks' products are summed, only rank 0 adds one."""
        return None if self.part.split == "inputs" and self.world.rank > 0 else self.bias

    @property
    def rounding(self) -> Rounding | None:
        """Quantization that may be applied to input rows beforehand, or None."""
        if self.target.fp8 is None or not isinstance(self.weight, Fp8Weight):
            return None
        return self.target.fp8.rounding(self.weight)

    def __call__(self, x: Tensor | Rounded, added: Tensor | None = None) -> Tensor:
        """added: this rank's share of a further summand, [rows, outputs]."""
        y = self.unreduced(x)
        return self.reduced(y if added is None else y + added)

    def unreduced(self, x: Tensor | Rounded) -> Tensor:
        """Return this rank's product before the all-reduce, with the bias if there is no all-reduce."""
        return self.target.multiply(x, self._multiplied, None if self._reduce else self.bias)

    def reduced(self, y: Tensor) -> Tensor:
        """Complete the product of `unreduced`."""
        if not self._reduce:
            return y
        y = self.world.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor | Rounded) -> Tensor:
        """Return x W^T of this rank, without all-reduce."""
        return self.target.multiply(x, self._multiplied)

    def partial_sum(self, x: Tensor | Rounded) -> Tensor:
        """Return x W^T + `own_bias` of this rank, without all-reduce."""
        return self.target.multiply(x, self._multiplied, self.own_bias)

    def in_fp32(self, x: Tensor) -> Tensor:
        """Return x W^T (+ b) of this rank in fp32, without all-reduce."""
        assert isinstance(self.weight, Tensor), "projections with fp32 output are not stored in fp8"
        return self.target.multiply_fp32(x, self.weight, self.bias)

    @property
    def _multiplied(self) -> OnDevice:
        assert not isinstance(self.weight, Packed | Segments), "a compiled model multiplies by packed weights itself"
        return self.weight
