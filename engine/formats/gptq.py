"""gptq: integers of 2 to 8 bits as a stream of bits along the inputs, zero points minus 1 (v1) or unchanged (gptq_v2),
scales [groups, outputs]. With desc_act, g_idx has the group of each input. `dynamic` has settings for the projections
that match a pattern, `+:` (settings) or `-:` (plain). Source: AutoGPTQ; GPTQModel 7.7, quantization/config.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.api.errors import CheckpointError
from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, group_size, refuse, words
from engine.formats.integers import Integers, Numbers, codes_of, unpacked, words_of
from engine.formats.layers import not_skipped, pattern
from engine.formats.marlin import Marlin
from engine.formats.native import Groups

BITS = (2, 3, 4, 5, 6, 7, 8)
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # difference of zero points to stored ones
PLAIN = "-:"


@dataclass(frozen=True)
class Gptq(Integers):
    zero_offset: int = 0  # added to stored zero points

    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"
    index: ClassVar[str] = "g_idx"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        bits, groups = self.stored.bits, words(inputs, self.stored.group or inputs)
        return {
            "qweight": Stored((words_of(inputs, bits), rows), ("I32",)),
            "qzeros": Stored((groups, words_of(rows, bits)), ("I32",)),
            "scales": Stored((groups, rows), SCALES),
            "g_idx": Stored((inputs,), ("I32", "I64"), optional=not self.stored.ordered),
            # Some exporters write a bias of zeros for a projection without bias.
            "bias": Stored((rows,), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        read, bits = matrix.read, self.stored.bits
        # [words of inputs, outputs]: transposed first, so that the inputs of an output are contiguous
        values = codes_of(read("qweight").T, bits, matrix.inputs)
        zeros = unpacked(read("qzeros"), bits)[:, : matrix.rows].T.to(torch.int16) + self.zero_offset
        return Numbers(values, read("scales").T, zeros)


def _format(settings: Settings, group: str) -> Format:
    """group: pattern of `dynamic` whose settings apply, or ""."""
    own = {**settings, **(settings["dynamic"][group] if group else {})}
    where = f"dynamic.{group}." if group else ""
    bits: Any = own.get("bits")
    if bits not in BITS:
        refuse(f"{where}bits", bits, f"gptq is supported with {BITS[0]} to {BITS[-1]} bits")
    if own.get("pack_dtype", "int32") != "int32":
        refuse("pack_dtype", own["pack_dtype"], "supported is int32")
    symmetric = own.get("sym", True) is True
    size = group_size(own.get("group_size", 128), f"{where}group_size")
    native = Groups(bits, size, zeros=not symmetric, ordered=own.get("desc_act") is True)
    version = "marlin" if own.get("is_marlin_format") else own.get("checkpoint_format") or "gptq"
    if version == "marlin":
        return Marlin.checked(native)
    if version not in VERSIONS:
        refuse("checkpoint_format", version, f"supported are {', '.join(VERSIONS)} and marlin")
    return Gptq.of(native, zero_offset=VERSIONS[version])


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    found = not_skipped(settings, paths, [] if settings.get("lm_head") is True else [head], where)
    dynamic: Mapping[str, Any] = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(one, dict) for one in dynamic.values()):
        raise CheckpointError(f"{where}.dynamic must be an object of patterns with settings")
    ends = settings.get("modules_in_block_to_quantize") or settings.get("inside_layer_modules")
    if ends:
        names = tuple(name for names in ends for name in (names if isinstance(names, list) else [names]))
        found = {path: group for path, group in found.items() if path.endswith(names)}
    patterns = [(name, pattern(name.removeprefix(PLAIN).removeprefix("+:"), where)) for name in dynamic]
    first = {path: next((name for name, one in patterns if one.match(path)), "") for path in found}
    return {path: name for path, name in first.items() if not name.startswith(PLAIN)}


METHOD = Method(
    name="gptq",
    format=_format,
    groups=_groups,
    advice="gptq or awq of 4 bits",
    table=(
        ("gptq (`gptq`, `gptq_v2`)", "2 to 8 bits; also `desc_act`, `dynamic`", "4 bits, from 5 bits on 8"),
        ("gptq", "8 bits with zero points", "dequantized"),
        ("gptq, `marlin`", "4 bits, symmetric", "4 bits"),
    ),
)
