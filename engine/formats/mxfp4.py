"""mxfp4: 4 bits (e2m1), two per byte, the low half first, with a power of two (e8m0) for each output and 32 inputs.

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, so its double is an integer:
w = integer · 2^(e - 128) exactly, where e is the byte of the scale. Source: OCP Microscaling Formats (MX) 1.0;
transformers integrations/mxfp4.py. Only routed experts are stored in this format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.formats.format import Format, Method, Settings, Stored, StoredMatrix, words
from engine.formats.integers import signed
from engine.formats.layers import all_but_skipped
from engine.formats.native import Groups

GROUP = 32
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the number of each code
EXPERTS = ".experts."
NOT_A_NUMBER = 255  # e8m0 of NaN


@dataclass(frozen=True)
class Mxfp4(Format):
    native: Groups = Groups(8, GROUP)

    matrix: ClassVar[str] = "blocks"
    scale: ClassVar[str] = "scales"
    scale_type: ClassVar[str] = "BF16"  # has the range of e8m0

    def __str__(self) -> str:
        return f"4 bits, groups of {GROUP}"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(inputs, GROUP)
        return {"blocks": Stored((rows, groups, GROUP // 2), ("U8",)), "scales": Stored((rows, groups), ("U8",))}

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        blocks, exponents = matrix.read("blocks").flatten(1), matrix.read("scales")
        if bool((exponents == NOT_A_NUMBER).any()):
            raise matrix.error(f"{matrix.path}.scales has the byte {NOT_A_NUMBER}, which is not a number")
        codes = torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, : matrix.inputs]
        values = torch.tensor(DOUBLED, dtype=torch.int8)[codes.int()]
        scales = exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16) / 2
        return signed(values, scales, GROUP)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    found = all_but_skipped(settings, paths, head, where)
    return {path: group for path, group in found.items() if EXPERTS in path}


METHOD = Method(
    name="mxfp4",
    format=lambda settings, group: Mxfp4(),
    groups=_groups,
    table=(("mxfp4", "experts of gpt-oss", "8 bits in groups of 32, the same numbers"),),
)
