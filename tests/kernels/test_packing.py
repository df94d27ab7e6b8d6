"""Order of packed weights, compared with a loop over every element, and search of scales, compared with torch."""

import os
import signal
import threading

import pytest
import torch

from kernels.cpu import quantize
from kernels.cpu.library import Tiling, in_threads, usable
from kernels.cpu.packing import Pieces, pack
from kernels.quantisation import FARTHEST, Int4Weight, Int8Weight, search_scales

AVX2, AVX512, AMX, BASE = (
    Tiling("avx2", 8, 4, 4),
    Tiling("avx512", 16, 4, 4),
    Tiling("amx", 16, 4, 4),
    Tiling("base", 4, 1, 1),
)
SHAPES = [(1, 1), (16, 32), (37, 70), (64, 131), (300, 96)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def by_element(weight: torch.Tensor, side: int, word: int, wide: int) -> torch.Tensor:
    """[outputs / side][wide / word][side][word], zero where the weight has no element."""
    outputs, inputs = weight.shape
    found = torch.zeros(-(-outputs // side), wide // word, side, word, dtype=weight.dtype)
    for output in range(outputs):
        for column in range(inputs):
            found[output // side, column // word, output % side, column % word] = weight[output, column]
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tiling", "dtype", "side", "word"),
    [
        (AVX2, torch.bfloat16, 16, 1),
        (AVX512, torch.float32, 32, 1),
        (AMX, torch.bfloat16, 16, 2),
        (BASE, torch.float32, 8, 1),
    ],
)
def test_each_element_has_its_place(tiling, dtype, side, word, shape):
    weight = numbers(*shape, dtype=dtype)
    wide = shape[1] if word == 1 else -(-shape[1] // 32) * 32
    expected = by_element(weight, side, word, wide)
    dirty = lambda shape, dtype: torch.full(shape, 7, dtype=dtype)  # noqa: E731
    assert torch.equal(pack(weight, tiling, None, dirty).data, expected)


@pytest.mark.parametrize("tiling", [AVX2, AMX, BASE])
def test_pieces_are_packed_like_the_whole_matrix(tiling):
    """Pieces begin at any output, are strided, transposed, or of other types."""
    whole = numbers(90, 68, dtype=torch.bfloat16)
    strided = torch.zeros(100, 80, dtype=torch.bfloat16)
    strided[1:70:2, 5:73] = whole[17:52]
    pieces = [(0, whole[:17].T.contiguous().T), (17, strided[1:70:2, 5:73]), (52, whole[52:].float())]
    packed = pack(Pieces(90, 68, torch.bfloat16, lambda: pieces), tiling)
    assert torch.equal(packed.data, pack(whole, tiling).data)
    device = torch.device("cpu")
    assert torch.equal(Pieces(90, 68, torch.bfloat16, lambda: pieces).whole(torch.float32, device), whole.float())


def test_a_large_matrix_is_packed_alike_by_any_number_of_threads():
    weight, threads = numbers(1100, 1000), torch.get_num_threads()
    expected = weight[:1088].view(68, 16, 1000).transpose(1, 2)
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            assert torch.equal(pack(weight, AVX2).data[:68].squeeze(3), expected), f"{count} threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("tiling", "word"), [(AVX2, 4), (BASE, 1)])
@pytest.mark.parametrize("zeros", [False, True, None])
def test_numbers_of_a_group_precede_its_scales(tiling, word, zeros):
    """zeros None: 8 bits."""
    outputs, inputs, group, bits = 21, 96, 32, 8 if zeros is None else 4
    side = tiling.width * (2 if bits == 8 else 1)
    random = torch.Generator().manual_seed(1)
    scales = numbers(outputs, inputs // group).half()
    points = torch.randint(0, 16, scales.shape, generator=random, dtype=torch.uint8) if zeros else None
    if bits == 8:
        values = torch.randint(-128, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        data = pack(Int8Weight(values, scales, group), tiling).data
    else:
        values = torch.randint(0, 16, (outputs, inputs), generator=random, dtype=torch.uint8)
        data = pack(Int4Weight(values, scales, points, group), tiling).data
    octets = group * bits // 8 * side
    for output in range(outputs):
        block, place = data[output // side], output % side
        for column in range(inputs):
            at = column % group
            if bits == 8:
                byte = block[column // group, at // word * side * word + place * word + at % word]
                assert int(byte) - 128 == int(values[output, column])
            else:
                pair, half = at // word // 2, at // word % 2
                byte = block[column // group, pair * side * word + place * word + at % word]
                assert int(byte) >> 4 * half & 15 == int(values[output, column])
        for number in range(inputs // group):
            tail = block[number, octets:]
            assert tail[2 * place : 2 * place + 2].view(torch.float16) == scales[output, number]
            if points is not None:
                assert tail[2 * side + place] == points[output, number]


def groups_of(size: int) -> torch.Tensor:
    """Some groups are zero, have one number, numbers of equal size, or numbers that float16 cannot scale."""
    groups = numbers(45, 7, size)
    groups[3] = 0.0
    groups[4, :, 1:] = 0.0
    groups[5] = groups[5].sign()
    groups[6] *= 1e-9
    groups[7] *= 1e7
    return groups


@pytest.mark.parametrize("size", [32, 64, 24])
@pytest.mark.parametrize(("farthest", "low", "high"), [(FARTHEST, -8, 7), ((-32.0, 31.5, -33.0), -32, 31)])
def test_compiled_search_finds_the_scales_of_torch(size, farthest, low, high):
    groups = groups_of(size)
    values, scales = quantize.search_scales(groups, farthest, low, high)
    expected_values, expected_scales = search_scales(groups, farthest, low, high)
    assert values.dtype == expected_values.dtype and values.shape == expected_values.shape
    assert (scales != expected_scales).float().mean() < 0.01

    def errors(found: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return (found.double() * of.double().unsqueeze(2) - groups).square().sum(2)

    own, others = errors(values, scales), errors(expected_values, expected_scales)
    assert (own <= others * (1 + 1e-5))[torch.isfinite(others)].all() and not own[3].any() and not scales[3].any()


def test_each_instruction_set_finds_the_same_scales(monkeypatch):
    """A lane is a group, so the width of registers changes nothing; a joined product and sum would, rarely."""
    groups, found = numbers(1000, 60, 32), []
    for variant in usable():
        monkeypatch.setattr(quantize, "best", lambda variant=variant: variant)
        found.append(quantize.search_scales(groups, FARTHEST, -8, 7))
    assert len(found) > 1, "a native build has its variant and base"
    for values, scales in found[1:]:
        assert torch.equal(values, found[0][0]) and torch.equal(scales, found[0][1])


def test_forks_have_threads_of_their_own() -> None:
    done, both = list[tuple[int, int]](), threading.Barrier(2)

    def part(first: int, last: int) -> None:
        both.wait(10)
        done.append((first, last))

    in_threads(2, 8, 1, part)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(5)  # with the threads of its parent it would wait forever
            in_threads(2, 8, 1, part)
        finally:
            os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4 and sorted(done) == [(0, 4), (4, 8)]
