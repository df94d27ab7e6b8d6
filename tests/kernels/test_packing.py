"""Order of packed weights, compared with a loop over every element, and search of scales, compared with torch."""

import ctypes
import dataclasses
import mmap
import os
import signal
import threading

import numpy as np
import pytest
import torch

from kernels.cpu import quantize
from kernels.cpu.library import Tiling, in_threads, usable
from kernels.cpu.packing import Pieces, pack
from kernels.joined import Joined
from kernels.quantisation import FARTHEST, Int4Weight, Int8Weight, joined, search_scales
from kernels.stored_codes import StoredCodes, unpacked

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


def in_words(rows: np.ndarray, bits: int) -> torch.Tensor:
    """[rows, numbers] → [rows, words] int32, the first number in the lowest bits."""
    each = 32 // bits
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % each))).reshape(len(rows), -1, each).astype(np.uint32)
    words = np.zeros(padded.shape[:2], dtype=np.uint32)
    for at in range(each):
        words |= padded[:, :, at] << np.uint32(bits * at)
    return torch.from_numpy(words.view(np.int32))


def in_blocks(octets: np.ndarray, first: int) -> torch.Tensor:
    """[outputs, blocks, bytes] as a view of blocks that begin with `first` other bytes."""
    blocks = np.full((*octets.shape[:2], octets.shape[2] + first), 0x5A, dtype=np.uint8)
    blocks[:, :, first:] = octets
    return torch.from_numpy(blocks)[:, :, first:]


def stored_codes(layout: str, bits: int, codes: np.ndarray) -> StoredCodes:
    """Store unsigned integers, [outputs, inputs], as files do."""
    outputs, inputs = codes.shape
    if layout == "columns":
        return StoredCodes(in_words(codes, bits).T.contiguous().T, "words", bits, inputs)
    if layout == "words":
        return StoredCodes(in_words(codes, bits), "words", bits, inputs)
    if layout == "across":
        order = [8 * word + one for word in range(outputs // 8) for one in (0, 2, 4, 6, 1, 3, 5, 7)]
        return StoredCodes(in_words(codes[order].T, bits).T, "across", bits, inputs)
    if layout == "halves":
        blocks = codes.reshape(outputs, -1, 2, 16)
        return StoredCodes(in_blocks(blocks[:, :, 0] | blocks[:, :, 1] << 4, 2), "halves", bits, inputs)
    if layout == "signed blocks":
        blocks = in_blocks((codes ^ 128).reshape(outputs, -1, 32), 2)
        return StoredCodes(blocks.view(torch.int8), "signed", bits, inputs)
    octets = torch.from_numpy(codes)
    return StoredCodes((octets ^ 128).view(torch.int8) if layout == "signed" else octets, layout, bits, inputs)


LAYOUTS = [
    *((layout, 4) for layout in ("words", "columns", "halves", "across")),
    *((layout, 8) for layout in ("words", "columns", "signed", "signed blocks", "unsigned")),
]


@pytest.mark.parametrize("tiling", [AVX2, AVX512, BASE])
@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (352, 128), (32, 64)])
def test_stored_codes_are_packed_like_unpacked_ones(layout, bits, inputs, group, tiling):
    """Parts begin at any output, with a group that is not full, in memory that is not zero."""
    random, parts, plain = np.random.default_rng(inputs + group), [], []
    for count, zeros in ((40, False), (24, bits == 4), (48, False)):
        codes = random.integers(0, 1 << bits, (count, inputs), dtype=np.uint8)
        values = torch.from_numpy(codes if bits == 4 else codes ^ 128).view(torch.uint8 if bits == 4 else torch.int8)
        scales = numbers(count, -(-inputs // group)).half()
        points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if zeros else None
        made = stored_codes(layout, bits, codes)
        assert torch.equal(made.unpacked(), values) and made.shape == values.shape
        for kept, found in ((made, parts), (values, plain)):
            found.append(Int8Weight(kept, scales, group) if bits == 8 else Int4Weight(kept, scales, points, group))
    dirty = lambda shape, dtype: torch.full(shape, 7, dtype=dtype)  # noqa: E731
    expected, found = pack(joined(plain), tiling), pack(Joined(tuple(parts)), tiling, None, dirty)
    assert torch.equal(found.data, expected.data)
    assert (found.outputs, found.inputs, found.zeros, found.form) == (112, inputs, bits == 4, expected.form)
    assert torch.equal(Joined(tuple(parts)).restored(), joined(plain).restored())


def test_parts_with_scales_of_different_types_have_them_in_float32():
    values, scales = torch.ones(24, 64, dtype=torch.int8), numbers(24, 2)
    parts = tuple(Int8Weight(values, scales.to(kind), 32) for kind in (torch.float16, torch.bfloat16))
    packed = pack(Joined(parts), AVX2)
    assert packed.scale_type == torch.float32
    tail = packed.data[1, 0, 32 * 16 :].view(torch.float32)
    assert torch.equal(tail, torch.cat((parts[0].scales[16:, 0].float(), parts[1].scales[:8, 0].float())))


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_shares_of_stored_codes_are_shares_of_the_integers(layout, bits):
    codes = np.random.default_rng(3).integers(0, 1 << bits, (48, 128), dtype=np.uint8)
    made = stored_codes(layout, bits, codes)
    values = made.unpacked()
    assert torch.equal(made.columns(32, 64).unpacked(), values[:, 32:96])
    assert torch.equal(made.columns(96, 32).unpacked(), values[:, 96:])
    assert torch.equal(unpacked(made.rows(slice(8, 24))), values[8:24])
    assert torch.equal(unpacked(made.rows(slice(3, 40, 2))), values[3:40:2])
    assert torch.equal(unpacked(made.rows(slice(5, 6))), values[5:6])
    odd = made.columns(3, 64)
    assert odd is None if made.unit > 1 else torch.equal(odd.unpacked(), values[:, 3:67])


def before_a_protected_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides. The process crashes if anything reads or writes beyond its last byte."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    octets = size * tensor.itemsize
    pages = -(-octets // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages)
    assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=size, offset=pages - octets)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
@pytest.mark.parametrize("rows", [slice(5, 6), slice(3, 40), slice(8, 48)])
@pytest.mark.parametrize("inputs", [33, 40, 96])
def test_packing_keeps_within_the_memory_of_the_file_and_of_the_weight(layout, bits, rows, inputs):
    if inputs % {"halves": 32, "signed blocks": 32}.get(layout, 1):
        inputs = 32
    codes = np.random.default_rng(inputs).integers(0, 1 << bits, (48, inputs), dtype=np.uint8)
    made = stored_codes(layout, bits, codes).rows(rows)
    values, scales = unpacked(made), numbers(48, -(-inputs // 32)).half()[rows]
    if isinstance(made, StoredCodes):
        made = dataclasses.replace(made, data=before_a_protected_page(made.data))
    kind, more = (Int8Weight, ()) if bits == 8 else (Int4Weight, (None,))
    empty = lambda shape, dtype: before_a_protected_page(torch.zeros(shape, dtype=dtype))  # noqa: E731
    for tiling in (AVX2, AVX512, BASE):
        found = pack(kind(made, before_a_protected_page(scales), *more, 32), tiling, None, empty)
        assert torch.equal(found.data, pack(kind(values, scales, *more, 32), tiling).data)


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_stored_codes_are_packed_alike_by_any_number_of_threads(layout, bits):
    codes = np.random.default_rng(4).integers(0, 1 << bits, (4152, 576), dtype=np.uint8)
    made, scales, threads = stored_codes(layout, bits, codes), numbers(4152, 9).half(), torch.get_num_threads()
    kind = (lambda values: Int8Weight(values, scales, 64)) if bits == 8 else (lambda v: Int4Weight(v, scales, None, 64))
    expected = pack(kind(made.unpacked()), AVX2)
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            assert torch.equal(pack(kind(made), AVX2).data, expected.data), f"{count} threads"
    finally:
        torch.set_num_threads(threads)


def test_stored_codes_are_not_unpacked_first(monkeypatch):
    """Each byte of the file is read once, without a copy of the matrix."""

    def fail(self: StoredCodes) -> torch.Tensor:
        raise AssertionError(f"{self.layout} is unpacked")

    scales = numbers(48, 2).half()
    for layout, bits in LAYOUTS:
        made = stored_codes(layout, bits, np.zeros((48, 128), dtype=np.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(StoredCodes, "unsigned", fail)
            patch.setattr(StoredCodes, "unpacked", fail)
            pack(Int8Weight(made, scales, 64) if bits == 8 else Int4Weight(made, scales, None, 64), AVX2)


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
