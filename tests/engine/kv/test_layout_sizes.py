"""How many blocks, how many groups: small numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from engine.api.errors import ConfigError
from engine.kv.layout import Group, Layout, blocks_of, layout, page_sizes
from engine.models.parts import Attention, Embedding, Head, Model, ResidualBlock
from kernels.page_codes import head_dim, vector_bytes


def model(windows, kv_heads=2):
    blocks = tuple(
        (ResidualBlock(body=Attention(hidden=8, heads=2, kv_heads=kv_heads, head_dim=4, rope=None, window=window)),)
        for window in windows
    )
    return Model(embed=Embedding(vocab=7, hidden=8), blocks=blocks, norm=None, head=Head(tied=True), max_context=64)


def one(window, block_tokens=4):
    return Layout((Group("g", (0,), window),), block_tokens, 1, 1, 1, 4)


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)])
def test_tokens_need_as_many_blocks_as_they_begin(tokens, blocks):
    assert blocks_of(tokens, 16) == blocks
    assert one(None, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    "full, window, size, groups",
    [(4, 22, 4, 7), (28, 0, 28, 1), (13, 13, 13, 2), (1, 5, 1, 6), (10, 52, 13, 5), (5, 5, 5, 2), (1, 0, 1, 1)],
)
def test_layers_fall_into_few_groups_with_little_spare(full, window, size, groups):
    made = layout(model([None] * full + [9] * window), block_tokens=4, element_bytes=4)
    assert (made.layers_per_block, len(made.groups)) == (size, groups)
    assert sorted(i for group in made.groups for i in group.layers) == list(range(full + window))
    assert groups * size - full - window <= 0.1 * (full + window)


def test_a_block_holds_keys_and_values_of_all_its_layers():
    made = layout(model([None] * 3), block_tokens=5, element_bytes=2)
    assert made.page_bytes == 2 * 5 * 2 * 4 * 2
    assert made.block_bytes == 3 * made.page_bytes
    assert made.blocks(10 * made.block_bytes - 1) == 9


def test_scales_count_for_each_key_and_each_value():
    made = layout(model([None]), block_tokens=5, element_bytes=1, scale_bytes=4)
    assert made.page_bytes == 2 * 5 * 2 * (4 + 4)


@pytest.mark.parametrize(("kv_cache", "dtype"), [("int8", torch.int8), ("int4", torch.uint8)])
def test_sizes_of_coded_pages_are_those_of_the_kernels(kv_cache, dtype):
    for dim in range(4, 200, 4):
        made = replace(one(None), head_dim=dim, **page_sizes(kv_cache))
        assert made.vector_bytes == vector_bytes(dim, dtype)
        assert head_dim(torch.empty(0, made.vector_bytes, dtype=dtype)) == dim


def of_shapes(*parts):
    """A model with layers of (number, window, KV heads, size of a head)."""
    blocks = []
    for count, window, kv_heads, dim in parts:
        part = Attention(hidden=8, heads=4, kv_heads=kv_heads, head_dim=dim, rope=None, window=window)
        blocks += [(ResidualBlock(body=part),)] * count
    return replace(model([]), blocks=tuple(blocks))


@pytest.mark.parametrize(
    ("parts", "layers", "names"),
    [
        ([(12, 9, 1, 8), (3, None, 1, 16)], [6, 6, 3], "full.0 window9.0 window9.1"),
        ([(4, 9, 4, 8), (2, None, 1, 16)], [1, 1, 1, 1, 2], "full.0 window9.0 window9.1 window9.2 window9.3"),
        ([(2, None, 3, 4), (3, None, 2, 4)], [2, 3], "full.2x4.0 full.3x4.0"),
    ],
)
def test_pages_of_several_shapes_fill_blocks_of_one_size(parts, layers, names):
    made = layout(of_shapes(*parts), block_tokens=5, element_bytes=2)
    assert " ".join(group.name for group in made.groups) == names
    assert sorted(len(group.layers) for group in made.groups) == sorted(layers)
    for group in made.groups:
        shape = made.shape(group)
        assert shape.layers * 2 * 5 * shape.kv_heads * shape.head_dim * 2 == made.block_bytes
        assert len(group.layers) <= shape.layers
    sizes = [2 * 2 * kv_heads * dim * count for count, _, kv_heads, dim in parts]
    assert made.token_bytes == sum(sizes)


def test_ranks_divide_the_heads_of_each_shape():
    made = layout(of_shapes((2, 9, 4, 8), (1, None, 1, 16)), block_tokens=4, element_bytes=4, ranks=2)
    assert [(shape.kv_heads, shape.head_dim) for shape in made.shapes] == [(1, 16), (2, 8), (2, 8)]


def test_scales_need_pages_of_one_shape():
    with pytest.raises(ConfigError, match="pages of several shapes and pages of latents cannot have scales"):
        layout(of_shapes((2, 9, 1, 8), (1, None, 1, 16)), block_tokens=4, element_bytes=1, scale_bytes=4)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("step_tokens", [1, 3, 4, 7])
def test_a_window_never_needs_more_blocks_than_stated_and_once_just_that(window, step_tokens):
    block_tokens, length = 4, 60
    stated = one(window).blocks_for(length, step_tokens)
    most = 0
    for first in range(length - step_tokens + 1):
        needed = range(max(0, first - window + 1), first + step_tokens)
        most = max(most, len({position // block_tokens for position in needed}))
    assert most == stated


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("step_tokens", [1, 3, 4, 7])
def test_a_chunk_never_needs_more_blocks_than_stated(chunk, step_tokens):
    block_tokens, length = 4, 60
    chunked = Layout((Group("g", (0,), None, chunk),), block_tokens, 1, 1, 1, 4)
    stated, most = chunked.blocks_for(length, step_tokens), 0
    for first in range(length - step_tokens + 1):
        needed = range(first // chunk * chunk, first + step_tokens)
        most = max(most, len({position // block_tokens for position in needed}))
    assert most <= stated <= most + 1


def test_positions_of_a_chunk_are_needed_until_it_ends():
    group = Group("g", (0,), None, 6)
    assert [group.needed_from(n) for n in (0, 5, 6, 11, 12)] == [0, 0, 6, 6, 12]
    for end in range(1, 30):
        assert group.released_at(end) == next(n for n in range(100) if group.needed_from(n) >= end)


def test_layers_of_one_chunk_form_groups_apart_from_windows_of_that_size():
    parts = [{"chunk": 9}, {"window": 9}, {"chunk": 9}, {}]
    blocks = tuple(
        (ResidualBlock(body=Attention(hidden=8, heads=2, kv_heads=2, head_dim=4, rope=None, **more)),) for more in parts
    )
    made = layout(replace(model([None]), blocks=blocks), block_tokens=4, element_bytes=4)
    found = {group.name: (group.layers, group.window, group.chunk) for group in made.groups}
    assert found == {
        "full.0": ((3,), None, None),
        "chunk9.0": ((0,), None, 9),
        "chunk9.1": ((2,), None, 9),
        "window9.0": ((1,), 9, None),
    }


@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
def test_the_longest_request_is_the_one_that_still_fits(blocks):
    assert one(None).tokens_in(blocks) == 4 * blocks
