"""Compare images of Llama 4 with transformers' processor. It needs torchvision, which is not installed, so the tests
replace it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict

from engine.api.errors import CheckpointError
from engine.media.families import read_processors
from engine.media.processor import process
from engine.worker.grid_positions import as_array
from tests.engine.media.torchvision_stand_in import imported

EDGE, PATCH = 16, 4
SIZES = ((1, 1), (16, 16), (17, 16), (40, 30), (100, 7), (5, 90), (64, 64), (33, 120), (3, 16), (31, 31))
MODULE = "transformers.models.llama4.image_processing_llama4"


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    with imported(MODULE) as found:
        yield found


def reference(theirs: Any, image: Image.Image, *, enlarges: bool) -> tuple[np.ndarray, tuple[int, int]]:
    kind = theirs.Llama4ImageProcessor
    processor = kind.__new__(kind)

    def resize(images: torch.Tensor, size: SizeDict, **_: Any) -> torch.Tensor:
        return torch.nn.functional.interpolate(images, (size.height, size.width), mode="bilinear", antialias=True)

    def normalize(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
        by_channel = (torch.tensor(each, dtype=images.dtype).view(-1, 1, 1) for each in (mean, std))
        return images.sub(next(by_channel)).div(next(by_channel))

    processor.resize, processor.normalize = resize, normalize
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()
    made = processor._preprocess(
        [pixels],
        **{"do_resize": True, "size": SizeDict(height=EDGE, width=EDGE), "resample": 2, "do_rescale": True},
        **{"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        **{"max_patches": 6, "resize_to_max_canvas": enlarges, "disable_grouping": True, "return_tensors": None},
    )
    return made["pixel_values"][0].float().numpy(), tuple(made["aspect_ratios"][0].tolist())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vision = {"patch_size": PATCH, "pixel_shuffle_ratio": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "vision_config": vision}))
    settings = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": EDGE, "width": EDGE}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "max_patches": 6}))
    return tmp_path


@pytest.mark.parametrize("enlarges", [False, True])
def test_tiles_and_prompts_equal_transformers(theirs: Any, folder: Path, enlarges: bool) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "resize_to_max_canvas": enlarges}))
    processor, rng = read_processors(folder).image, np.random.default_rng(2)
    assert processor is not None
    for width, height in SIZES:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        tiles, (rows, columns) = reference(theirs, image, enlarges=enlarges)
        found = process(processor, image)
        np.testing.assert_array_equal(as_array(found.tensors["pixel_values"]), tiles, err_msg=f"{width} x {height}")
        expected = "<|image_start|>"
        for _ in range(rows if rows * columns > 1 else 0):
            expected += "<|tile_x_separator|>".join(["<|patch|>"] * columns) + "<|tile_y_separator|>"
        assert found.text == f"{expected}<|image|><|patch|><|image_end|>"
        # 16 patches of a tile, joined in squares of four.
        assert found.runs == (4,) * len(tiles)


def test_other_settings_are_refused(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16, "width": 20}}))
    with pytest.raises(CheckpointError, match="size must be a square"):
        read_processors(folder)


def test_a_ratio_without_tokens_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["pixel_shuffle_ratio"] = 1e10
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="division"):
        read_processors(folder)
