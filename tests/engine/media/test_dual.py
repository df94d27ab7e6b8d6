"""Image processors of models with an image encoder of their own: the same tensors as transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from engine.media.families import read_processors
from engine.media.processor import process
from engine.worker.grid_positions import as_array

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip": (CLIPImageProcessorPil, {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 18}}),
    "siglip": (SiglipImageProcessorPil, {"size": {"height": 16, "width": 20}}),
    "siglip2": (Siglip2ImageProcessorPil, {"patch_size": 4, "max_num_patches": 30}),
}
SIZES = ((40, 30), (1, 1), (7, 61), (200, 3), (16, 16))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_tensors_equal_transformers(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    made, settings = CASES[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    reference = made(**settings)
    (tmp_path / "preprocessor_config.json").write_text(reference.to_json_string())
    processor = read_processors(tmp_path).image
    assert processor is not None
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(pixels)
    found = process(processor, image)
    assert (found.text, found.runs) == ("", (1,))
    want = reference(images=[image], return_tensors="np")
    tensors = {name: as_array(one) for name, one in found.tensors.items()}
    if kind == "siglip2":
        np.testing.assert_array_equal(tensors["spatial_shapes"], want["spatial_shapes"])
        kept = want["pixel_attention_mask"][0].astype(bool)
        np.testing.assert_allclose(tensors["pixel_values"], want["pixel_values"][0][kept], atol=1e-5)
    else:
        np.testing.assert_allclose(tensors["pixel_values"], want["pixel_values"], atol=1e-5)
