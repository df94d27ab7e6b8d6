"""mxfp4 of gpt-oss: e2m1 in blocks of 16 bytes, with a power of two (e8m0) for each output and 32 inputs (floats.py).

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, so its double is an integer:
w = integer · 2^(e - 128) exactly, where e is the byte of the scale. Source: OCP Microscaling Formats (MX) 1.0;
transformers integrations/mxfp4.py. Only routed experts are stored in this format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.formats.floats import MX_BLOCKS, MX_GROUP, doubled, mx_blocks, power_of_two
from engine.formats.format import Format, Method, Settings, Stored, StoredMatrix, words
from engine.formats.integers import signed
from engine.formats.layers import all_but_skipped
from engine.formats.native import Executor, Groups, Native

if TYPE_CHECKING:
    from kernels.ggml_blocks import BlockWeight

GROUP = MX_GROUP
EXPERTS = ".experts."


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

    def on(self, executor: Executor) -> Native | None:
        return MX_BLOCKS if MX_BLOCKS.roles(executor) else super().on(executor)

    def blocks(self, matrix: StoredMatrix) -> "BlockWeight":
        return mx_blocks(matrix, "blocks", "scales")

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        values = doubled(matrix.read("blocks").flatten(1))[:, : matrix.inputs]
        scales = power_of_two(matrix, "scales").to(torch.bfloat16) / 2
        return signed(values, scales, GROUP)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    found = all_but_skipped(settings, paths, head, where)
    return {path: group for path, group in found.items() if EXPERTS in path}


METHOD = Method(
    name="mxfp4",
    format=lambda settings, group: Mxfp4(),
    groups=_groups,
    table=(("mxfp4", "experts of gpt-oss", "its own blocks"),),
)
