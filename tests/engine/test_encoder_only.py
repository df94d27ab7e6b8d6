"""Towers alone, and prompts with embeddings that another engine computed: replies equal those of transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError, RequestError, TaskError
from engine.api.messages import Pooling
from engine.lowering.footprint import Holder, footprint, part_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint
from kernels.cpu.library import best
from tests.engine.layers.test_footprint import compare
from tests.engine.media_models import FAMILIES, Family, Picture, check, counts, greedy, opened

EACH = Pooling("token_embed")
ONLY = TaskConfig(encoder_only=True)
GIVEN = TaskConfig(accepts_embeddings=True, images=False)
BOTH = TaskConfig(accepts_embeddings=True)
GRIDS = ("image_grid_thw",)
KERNELS = ("torch", best())


@pytest.fixture(scope="module", params=["llava", "qwen3-vl", "gemma3"])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Picture, Picture]:
    make, picture = FAMILIES[request.param]
    return make(tmp_path_factory.mktemp("family")), picture(1), picture(2)


def embedded(one: Picture, rows: np.ndarray) -> Picture:
    """Return the picture with embeddings in place of pixels."""
    grids = {name: one.tensors[name] for name in GRIDS if name in one.tensors}
    return Picture({"embeddings": torch.from_numpy(rows.copy()), **grids}, one.tokens)


@pytest.mark.parametrize("kernels", KERNELS)
def test_replies_to_embeddings_equal_those_to_images(case: tuple[Family, Picture, Picture], kernels: str) -> None:
    """The towers compute items in steps that are smaller than an item, and a repeated one is not computed again. The
    decoder has no tower, and prompts with embeddings share cached blocks."""
    family, one, other = case
    with opened(family, kernels, task=ONLY, max_step_tokens=4, max_running=2) as llm:
        rows = llm.pool([family.prompt(one), family.prompt(other), family.prompt(one)], EACH)
        again = llm.pool([family.prompt(one)], EACH)
        assert counts(llm)[0] == 2
    assert np.array_equal(rows[0], rows[2]) and np.array_equal(rows[0], again[0])
    media = read_checkpoint(family.folder).model.media
    assert media is not None and rows[0].shape == (one.tokens, media.width)
    given, last = embedded(one, rows[0]), embedded(other, rows[1])
    with opened(family, kernels, task=GIVEN, max_step_tokens=24, max_running=4) as llm:
        found = llm.generate([family.prompt(3, given, 5), family.prompt(given, 2, last, 1)], greedy())
        warm = llm.generate([family.prompt(3, given, 5)], greedy())
    check(found[0], family.reply(3, one, 5))
    check(found[1], family.reply(one, 2, other, 1))
    check(warm[0], family.reply(3, one, 5))
    assert warm[0].timing.cached_tokens


def test_embeddings_and_images_are_mixed(case: tuple[Family, Picture, Picture]) -> None:
    family, one, other = case
    with opened(family, "torch", task=ONLY) as llm:
        (rows,) = llm.pool([family.prompt(one)], EACH)
    with opened(family, "torch", task=BOTH) as llm:
        (found,) = llm.generate(family.prompt(embedded(one, rows), 2, other, 1), greedy(3))
    check(found, family.reply(one, 2, other, 1, count=3))


def test_two_ranks_and_triton_compute_towers_alone(tmp_path: Path) -> None:
    make, picture = FAMILIES["qwen3-vl"]
    family, one, other = make(tmp_path), picture(1), picture(2)
    prompts = [family.prompt(one), family.prompt(other)]
    with opened(family, "torch", task=ONLY) as llm:
        wanted = llm.pool(prompts, EACH)
    for kernels, more in (("torch", {"tensor": 2}), ("triton", {"max_step_tokens": 8, "max_running": 2})):
        with opened(family, kernels, task=ONLY, **more) as llm:
            for found, rows in zip(llm.pool(prompts, EACH), wanted, strict=True):
                np.testing.assert_allclose(found, rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_towers_are_loaded(case: tuple[Family, Picture, Picture], kernels: str) -> None:
    """Planned bytes equal loaded bytes. The other service loads everything but the towers."""
    family, _, _ = case
    parts = {}
    for task in (ONLY, GIVEN, TaskConfig()):
        found = read_checkpoint(family.folder, task=task)
        check_tensors(found.model, found.tensors)
        compare(found, kernels)
        parts[task] = part_bytes(footprint(found.model, found.tensors, None, Holder("float32")))
    only, given, whole = ({name: size for name, size in own.items() if size} for own in parts.values())
    assert only == {"tower": whole["tower"]}
    assert given == {name: size for name, size in whole.items() if name != "tower"}


def test_other_inputs_are_refused(case: tuple[Family, Picture, Picture]) -> None:
    family, one, _ = case
    with opened(family, "torch", task=ONLY) as llm:
        for prompt in (family.prompt(3), family.prompt(one, 2), family.prompt(one, one)):
            with pytest.raises(RequestError, match="one item alone"):
                llm.pool([prompt], EACH)
        with pytest.raises(RequestError, match="supported are token_embed"):
            llm.pool([family.prompt(one)], Pooling("embed"))
    with opened(family, "torch", task=GIVEN) as llm:
        wide = read_checkpoint(family.folder).model.media
        assert wide is not None
        wrong = embedded(one, np.zeros((one.tokens, 7), np.float32))
        few = replace(embedded(one, np.zeros((2, wide.width), np.float32)), tokens=one.tokens)
        told = {"its tower is not loaded": one, "a row must have": wrong, "2 embeddings, but": few}
        failed = llm.generate([family.prompt(each, 2) for each in told.values()], greedy(1))
    for message, reply in zip(told, failed, strict=True):
        assert message in (reply.error or "")


def test_embeddings_beyond_the_range_of_the_type_are_named(tmp_path: Path) -> None:
    """They are finite in float32."""
    make, picture = FAMILIES["llava"]
    family, one = make(tmp_path), picture(1)
    width = read_checkpoint(family.folder).model.embed.hidden
    large = embedded(one, np.full((one.tokens, width), 3.4e38, np.float32))
    with opened(family, "torch", task=GIVEN, dtype="bfloat16") as llm:
        (failed,) = llm.generate([family.prompt(large, 2)], greedy(1))
    assert "beyond the range of bfloat16" in (failed.error or "")


def test_a_missing_tensor_of_a_tower_is_named(case: tuple[Family, Picture, Picture]) -> None:
    found = read_checkpoint(case[0].folder, task=ONLY)
    assert found.model.media is not None
    name = next(name for name in found.tensors if name.startswith(found.model.media.tower.root))
    tensors = {key: one for key, one in found.tensors.items() if key != name}
    with pytest.raises(CheckpointError, match="lacks"):
        check_tensors(found.model, tensors)


@pytest.mark.parametrize(
    ("task", "key"),
    [
        (ONLY, "encoder_only"),
        (BOTH, "accept_embeddings"),
        (TaskConfig(encoder_only=True, images=False), "encoder_only"),
        (TaskConfig(encoder_only=True, task="generate"), "model.task"),
        (TaskConfig(encoder_only=True, pool="mean"), "model.pooling"),
        (TaskConfig(encoder_only=True, accepts_embeddings=True), "accept_embeddings"),
    ],
)
def test_keys_without_effect_are_refused(task: TaskConfig, key: str, tmp_path: Path) -> None:
    make, _ = FAMILIES["llava"]
    family = make(tmp_path)
    if task in (ONLY, BOTH):
        task = replace_text_only(task)
    with pytest.raises(TaskError, match=key):
        read_checkpoint(family.folder, task=task)


def replace_text_only(task: TaskConfig) -> TaskConfig:
    """Return the task with the key that removes the towers."""
    return TaskConfig(text_only=True, encoder_only=task.encoder_only, accepts_embeddings=task.accepts_embeddings)
