"""Which quantized weights can be fused and split, as data."""

import pytest

from engine.formats.load_time import LOAD_FORMATS, load_formats
from engine.formats.native import E4M3, FP8_BLOCK, Groups, Native, block_unit, fuse, split_sizes

FOUR = Groups(4, 32)


@pytest.mark.parametrize(
    ("sources", "fused"),
    [
        ([FOUR], FOUR),
        ([FOUR, FOUR, FOUR], FOUR),
        ([FOUR, Groups(4, 32, zeros=True)], Groups(4, 32, zeros=True)),
        ([FOUR, Groups(4, 32, ordered=True)], Groups(4, 32, ordered=True)),
        ([FOUR, None], None),
        ([None], None),
        ([FOUR, Groups(8, 32)], None),
        ([FOUR, Groups(4, 64)], None),
        ([Groups(4, 128), Groups(4, None)], None),
        ([FOUR, E4M3("tensor")], None),
        ([E4M3("tensor", "static")], E4M3("channel", "static")),
        ([E4M3("tensor"), E4M3("channel")], E4M3("channel")),
        ([E4M3("block"), E4M3("block")], E4M3("block")),
        ([E4M3("block"), E4M3("channel")], None),
        ([E4M3("tensor", "static"), E4M3("tensor", "dynamic")], None),
    ],
)
def test_sources_of_one_kind_are_fused(sources: list[Native | None], fused: Native | None) -> None:
    assert fuse(sources) == fused
    assert fuse(reversed(sources)) == fused


@pytest.mark.parametrize(
    ("native", "inputs", "sizes"),
    [
        (Groups(4, 32), 96, (1, 3)),
        (Groups(4, None), 96, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
        (Groups(4, 32, ordered=True), 96, (1,)),
        (Groups(8, 128), 96, (1,)),
        (E4M3("block"), 4 * FP8_BLOCK, (1, 2, 4)),
        (E4M3("channel"), 6, (1, 2, 3, 6)),
    ],
)
def test_ranks_split_inputs_between_groups(native: Native, inputs: int, sizes: tuple[int, ...]) -> None:
    assert split_sizes(native, inputs) == sizes


def test_unit_of_blocks_divides_the_start_of_every_piece() -> None:
    assert block_unit([(0, 0), (128, 256)]) == 128
    assert block_unit([(0, 0), (64, 192)]) == 64
    assert block_unit([(0, 0), (0, 7)]) == 1


def test_executors_have_formats_at_load() -> None:
    assert load_formats("compiled") == ("int8", "int6", "int4") and load_formats("triton") == ("int8", "int4", "fp8")
    assert load_formats("torch") == ()
    assert [one.head for one in LOAD_FORMATS.values()] == ["int8", "int8", "int8", "stored"]
