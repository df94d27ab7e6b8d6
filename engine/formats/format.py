"""Declaration of a quantization format: how a checkpoint stores a matrix, and how that is read.

A format's file declares the tensors of a matrix (`Format.tensors`), its numbers for the executor that multiplies by
them (`Format.native`, `Format.unpack`) or their values in float32 (`Format.dequantize`), and how a checkpoint's
settings name it (`Method`). Plans import no torch, so only functions that read tensors import it.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from engine.api.errors import CheckpointError
from engine.formats.layers import all_but_skipped
from engine.formats.native import Executor, Native

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ggml_blocks import BlockWeight

PLAIN = ("F32", "BF16", "F16", "F64")
SCALES = ("F16", "BF16", "F32")
GROUP_MULTIPLE = 32  # inputs of a group that kernels multiply by
Settings = Mapping[str, Any]


class UnsupportedFormat(Exception):
    """Raised with the reason why settings are not supported."""


@dataclass(frozen=True)
class Stored:
    """Shape and types of a stored tensor."""

    shape: tuple[int, ...]  # (1,) also accepts a scalar tensor
    types: tuple[str, ...] = PLAIN  # as in safetensors headers; empty: any ggml type
    optional: bool = False  # a checkpoint may lack it
    flat: bool = False  # dimensions of 1 may be missing or added
    any_shape: bool = False  # the format compares the shape as it reads the tensor

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.any_shape:
            return True
        if self.flat:
            return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]
        return shape == self.shape or (self.shape == (1,) and shape == ())


class StoredMatrix(Protocol):
    """The tensors of one matrix in a checkpoint, by the last component of their names."""

    path: str
    rows: int
    inputs: int

    def read(self, suffix: str) -> "Tensor": ...
    def has(self, suffix: str) -> bool: ...
    def type(self, suffix: str) -> str:
        """Return the type in the checkpoint, such as `I32` or `Q4_K`."""

    def error(self, text: str) -> CheckpointError:
        """Return an error that begins with the name of the file."""


@dataclass(frozen=True)
class Format:
    """How a checkpoint stores a matrix, [outputs, inputs]."""

    native: Native | None = None  # product of the executor that multiplies by its numbers; None: dequantized at load

    matrix: ClassVar[str] = "weight"  # tensor with the numbers
    scale: ClassVar[str] = ""  # tensor with the scales of groups; "": within the numbers, in float16
    scale_type: ClassVar[str] = ""  # type of the scales in memory, as in headers; "": that of the tensor
    is_quantized: ClassVar[bool] = True  # False: plain numbers in another order
    needs_inputs: ClassVar[bool] = False  # the product depends on the number of inputs (`for_inputs`)
    float16_pages: ClassVar[bool] = False  # a KV cache on a CPU is float16 by default, as the scales are

    def __str__(self) -> str:
        """Return a short description such as `4 bits, groups of 128`."""
        return str(self.native)

    @property
    def quantizable(self) -> bool:
        """True if `quantization.weights` may quantize the dequantized weights."""
        return self.native is None

    def on(self, executor: Executor) -> Native | None:
        """Return the product of this executor, or None if it needs the weights dequantized."""
        return self.native if self.native is not None and self.native.roles(executor) else None

    def for_inputs(self, inputs: int) -> "Format":
        """Return the format of a matrix with this number of inputs."""
        return self

    def named(self, path: str, tensors: Container[str]) -> "Format | None":
        """Return the format with the names that this checkpoint's tensors have, or None if they are plain. path: of the
        matrix."""
        return self

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        """Return the tensors of a matrix by the last component of their names."""
        return {"weight": Stored((rows, inputs), ())}

    def unpack(self, matrix: StoredMatrix) -> Any:
        """Return the numbers for `native`: `Int4Weight` or `Int8Weight` for `Groups`, `Fp8Weight` for `E4M3`. Raises
        CheckpointError if they contradict the declaration."""
        raise NotImplementedError(f"{type(self).__name__} has no product")

    def blocks(self, matrix: StoredMatrix) -> "BlockWeight":
        """Return the blocks for `GgmlBlocks`."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks of ggml")

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        """Return the values of the weights, [outputs, inputs] float32."""
        restored: Tensor = self.unpack(matrix).restored()
        return restored

    def bias(self, bias: "Tensor") -> "Tensor":
        """Return the bias in the order of the declared outputs."""
        return bias


@dataclass(frozen=True)
class Method:
    """A value of `quant_method` in quantization_config."""

    name: str
    format: Callable[[Settings, str], Format]
    """Return the format of a group of projections. Raises UnsupportedFormat with the reason."""
    groups: Callable[[Settings, Sequence[str], str, str], dict[str, str]] = all_but_skipped
    """Return the quantized projections with the names of their groups. Arguments: settings, paths of all projections,
    path of the head, start of error messages."""
    file: str = ""  # file with the settings, for checkpoints whose config.json has none
    file_settings: Callable[[Settings, str], dict[str, Any]] | None = None  # reads them; arguments: content, file
    advice: str = ""  # supported checkpoints, for messages
    table: tuple[tuple[str, str, str], ...] = ()
    """Rows of docs/models.md: checkpoint, supported, stored as."""


def words(count: int, each: int) -> int:
    """Return the words for `count` numbers, `each` per word."""
    return -(-count // each)


def refuse(key: str, value: Any, supported: str) -> NoReturn:
    raise UnsupportedFormat(f"{key} is {value!r}; {supported}")


def one_of(key: str, value: Any, supported: tuple[str, ...]) -> Any:
    """Return the value if it is supported."""
    if value not in supported:
        refuse(key, value, f"supported {'are' if len(supported) > 1 else 'is'} {', '.join(supported)}")
    return value


def group_size(size: Any, key: str) -> int | None:
    """Return the number of inputs per group, or None for -1 (all inputs)."""
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        refuse(key, size, "supported are whole numbers above 0, and -1")
    return size


def whole_number(value: Any, key: str) -> int:
    """Return a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(key, value, "it must be a whole number above 0")
    return value
