"""Compare images and clips of Phi-4-multimodal with transformers' processors."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Phi4MultimodalFeatureExtractor
from transformers.image_utils import SizeDict

from engine.api.errors import CheckpointError
from engine.api.media import BESIDE_IMAGES, EMBEDDINGS, MediaTensor
from engine.media import phi4_audio
from engine.media.families import read_processors
from engine.media.processed import Known, MediaError, Processed, Tokens
from engine.media.processor import process, process_audio
from engine.media.prompt import expand
from engine.worker.grid_positions import as_array
from tests.engine.media.torchvision_stand_in import imported

SIZES = ((1, 1), (448, 448), (449, 448), (900, 500), (30, 440), (1000, 460), (2100, 20), (7, 300))
"""Width and height: small, one tile, two with one column of patches in the second, odd numbers of patches, more tiles
than the limit."""
MODULE = "transformers.models.phi4_multimodal.image_processing_phi4_multimodal"
MOST = 5


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    with imported(MODULE) as found:
        yield found


def reference(theirs: Any, image: Image.Image) -> dict[str, Any]:
    kind = theirs.Phi4MultimodalImageProcessor
    processor = kind.__new__(kind)

    def resize(pixels: torch.Tensor, size: SizeDict, resample: int, antialias: bool) -> torch.Tensor:
        assert resample == 3 and not antialias
        return torch.nn.functional.interpolate(pixels.unsqueeze(0), (size.height, size.width), mode="bicubic")[0]

    def normalised(pixels: torch.Tensor, *_: Any) -> torch.Tensor:
        return (pixels.float() - 127.5) / 127.5

    processor.resize, processor.rescale_and_normalize = resize, normalised
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()
    return dict(
        processor._preprocess(
            [pixels],
            **{"do_resize": True, "size": SizeDict(height=448, width=448), "resample": 3, "do_rescale": True},
            **{"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            **{"patch_size": 14, "dynamic_hd": MOST, "return_tensors": None},
        )
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    audio = Phi4MultimodalFeatureExtractor().to_dict()
    settings = {"image_processor": {"dynamic_hd": MOST}, "audio_processor": {**audio, "mel_filters": None}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_and_numbers_of_tokens_equal_transformers(theirs: Any, folder: Path, size: tuple[int, int]) -> None:
    processor, rng = read_processors(folder).image, np.random.default_rng(2)
    assert processor is not None
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))
    wanted, found = reference(theirs, image), process(processor, image)
    (count,) = wanted.pop("num_img_tokens")
    assert (found.text, found.runs) == ("<|image|>", (count,)) and found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        own = as_array(found.tensors[name])
        assert own.dtype == tensor.numpy().dtype and own.shape == tuple(tensor.shape)
        np.testing.assert_allclose(own, tensor.numpy(), rtol=0, atol=1e-5, err_msg=name)


def test_every_aspect_ratio_fits_or_is_refused(theirs: Any, folder: Path) -> None:
    """Tiles are the reference's, and all of them have patches of the image."""
    kind, processor = theirs.Phi4MultimodalImageProcessor, read_processors(folder).image
    own, refused = kind.__new__(kind), 0
    for width in (1, 20, 448, 460, 700, 1000, 2300, 5000, 40_000):
        for height in (1, 23, 449, 620, 1111, 3000):
            try:
                fitted = processor._fitted(width, height)  # type: ignore[union-attr]
            except MediaError:
                refused += 1
                continue
            assert all(count > 0 for counts in processor._patches(fitted) for count in counts)  # type: ignore[union-attr]
            if -(-width // 448) * -(-height // 448) > MOST:
                ratios = {
                    (i, j) for n in range(1, 6) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= MOST
                }
                ordered = sorted(ratios, key=lambda one: one[0] * one[1])
                best = own.find_closest_aspect_ratio(width / height, ordered, width, height, 448)
                assert (fitted.columns, fitted.rows) == best
    assert 0 < refused < 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 448, "width": 336}}, "size must be a square"),
        ({"size": {"height": 462, "width": 462}}, "even number of patches"),
        ({"resample": 2}, "resample is 2"),
        ({"dynamic_hd": 0}, "dynamic_hd"),
    ],
)
def test_other_settings_of_images_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    with pytest.raises(CheckpointError, match=message):
        read_processors(folder)


def test_requests_may_limit_the_number_of_tiles(folder: Path) -> None:
    processor = read_processors(folder, {"dynamic_hd": 1}).image
    assert processor is not None
    assert processor.layout(448, 448).runs[0] == processor.layout(4480, 4480).runs[0] == 2 * 16 * 17 + 1
    with pytest.raises(MediaError, match="dynamic_hd"):
        read_processors(folder, {"dynamic_hd": 1000})


@pytest.mark.parametrize("samples", [400, 559, 16_000, 37_123])
def test_spectrograms_and_numbers_of_tokens_equal_transformers(folder: Path, samples: int) -> None:
    processor = read_processors(folder).audio
    assert processor is not None
    clip = np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)
    wanted = Phi4MultimodalFeatureExtractor()(clip, sampling_rate=16_000)
    found = process_audio(processor, clip)
    assert found.runs == (int(wanted["audio_embed_sizes"][0]),)
    assert found.tensors.keys() == wanted.keys() == {"audio_input_features", "audio_embed_sizes"}
    for name, tensor in found.tensors.items():
        np.testing.assert_allclose(as_array(tensor), wanted[name].numpy(), rtol=0, atol=1e-5, err_msg=name)


def test_spectrograms_of_long_clips_take_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips have up to 30 minutes, and a process of the gateway 1 GiB."""
    processor = read_processors(folder).audio
    assert processor is not None
    clip = np.random.default_rng(1).normal(0, 0.1, 60 * 16_000).astype(np.float32)
    whole = processor.tensors(clip)["audio_input_features"]
    monkeypatch.setattr(phi4_audio, "BLOCK", 500)
    tracemalloc.start()
    found = processor.tensors(clip)["audio_input_features"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)
    assert peak < 4 * clip.nbytes


def test_short_clips_and_other_settings_of_audio_are_refused(folder: Path) -> None:
    processor = read_processors(folder).audio
    assert processor is not None
    with pytest.raises(MediaError, match="shorter"):
        processor.layout(399)
    for settings, message in (({"n_fft": 400}, "n_fft is 400"), ({"mel_max_frequency": 9000}, "to 9000 Hz")):
        (folder / "processor_config.json").write_text(json.dumps({"audio_processor": settings}))
        with pytest.raises(CheckpointError, match=message):
            read_processors(folder)


def test_clips_of_prompts_with_images_are_other_items() -> None:
    """The embeddings differ, so prompts with and without images must not share embeddings or pages."""
    tensor = MediaTensor("int64", (1,), bytes(8))
    known = {
        "image": Known(Tokens("<i>", "<i>"), 1),
        "audio": Known(Tokens("<a>", "<a>", beside_images=True), 2),
    }
    image = Processed(b"1", "<i>", (1,), {"x": tensor})
    clip = Processed(b"2", "<a>", (2,), {"y": tensor}, "audio", "audio")
    given = Processed(b"3", "<a>", (1,), {EMBEDDINGS: tensor}, "audio", "audio")

    def encode(text: str) -> list[int]:
        return [{"<i>": 1, "<a>": 2}[word] for word in text.split()]

    alone = expand("<a> <a>", [clip, given], known, encode).media
    assert [one.digest for one in alone] == [b"2", b"3"] and alone[0].tensors == clip.tensors
    before, _, after, embedded = expand("<a> <i> <a> <a>", [clip, image, clip, given], known, encode).media
    assert before.digest == after.digest != b"2" and set(before.tensors) == {"y", BESIDE_IMAGES}
    assert embedded == type(embedded)("audio", b"3", embedded.spans, given.tensors)
    plain = {**known, "audio": Known(Tokens("<a>", "<a>"), 2)}
    assert expand("<i> <a>", [image, clip], plain, encode).media[1].digest == b"2"
