"""Image processors against transformers' with the PIL back end: tensors, token counts and prompt ids."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.idefics2.processing_idefics2 import Idefics2Processor
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from engine.api.errors import CheckpointError
from engine.api.media import MediaItem
from engine.media.decode import decode
from engine.media.families import read_processors
from engine.media.processed import Known, MediaError, Processed, Tokens
from engine.media.processor import Processor, process
from engine.media.prompt import MediaPromptError, expand
from tests.engine.media.families import FAMILIES, Idefics2Reference, own_tokenizer, reference, reference_ids, write
from tests.engine.media.torchvision_stand_in import imported

SIZES = [(1, 1), (28, 28), (29, 57), (64, 17), (101, 20), (7, 90), (200, 200)]
"""Width and height."""


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of smooth noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def processor_of(folder: Path) -> Processor:
    found = read_processors(folder).image
    assert found is not None
    return found


def arrays(processed: Processed) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
        for name, tensor in processed.tensors.items()
    }


def assert_equal(found: Processed, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    own = arrays(found)
    assert own.keys() == expected.keys()
    for name, array in own.items():
        wanted = np.asarray(expected[name])
        assert array.shape == wanted.shape and array.dtype == wanted.dtype, name
        np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6, err_msg=name)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return write(family, tmp_path)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tensors_and_prompt_equal_transformers(family: str, folder: Path, size: tuple[int, int]) -> None:
    """Also where texts around an image token merge with their neighbours."""
    image, processor, tokenizer = noise(*size), processor_of(folder), own_tokenizer(folder)
    tensors, text = reference(family, image)
    found = process(processor, image)
    assert_equal(found, tensors)
    assert processor.layout(*size).count == sum(found.runs) == text.count(processor.tokens.image)
    prompt = "user\n" + FAMILIES[family].placeholder + "\nWhat is this?"
    image_id = tokenizer.convert_tokens_to_ids(processor.tokens.image)
    assert image_id is not None
    expanded = expand(prompt, [found], {"image": Known(processor.tokens, image_id)}, tokenizer.encode)
    assert expanded.ids == reference_ids(folder, prompt.replace(FAMILIES[family].placeholder, text))
    (item,) = expanded.media
    at_spans = [at for first, count in item.spans for at in range(first, first + count)]
    assert at_spans == [at for at, token in enumerate(expanded.ids) if token == image_id]
    assert item.digest == found.digest and item.tensors == found.tensors


def test_settings_in_processor_config_are_read(family: str, tmp_path: Path) -> None:
    image = noise(40, 30)
    found = process(processor_of(write(family, tmp_path, nested=True)), image)
    assert_equal(found, reference(family, image)[0])


FILES = {
    "rgba": (noise(40, 30, "RGBA"), "PNG", {}),
    "palette": (noise(40, 30, "P"), "PNG", {"transparency": 3}),
    "grey and alpha": (noise(40, 30, "LA"), "PNG", {}),
    "grey": (noise(40, 30, "L"), "JPEG", {}),
    "one bit": (noise(40, 30, "1"), "PNG", {}),
    "cmyk": (noise(40, 30, "CMYK"), "JPEG", {}),
    "16 bit": (Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), "PNG", {}),
    "float": (Image.fromarray(np.linspace(0, 255, 1200, dtype=np.float32).reshape(30, 40)), "TIFF", {}),
    "lossless": (noise(40, 30), "WEBP", {"lossless": True}),
    "animation": (noise(40, 30), "GIF", {"save_all": True, "append_images": [noise(40, 30, seed=1)]}),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_any_mode_equal_transformers(name: str, tmp_path: Path) -> None:
    image, form, options = FILES[name]
    data = file_of(image, form, **options)
    found = process(processor_of(write("llava", tmp_path)), decode(data))
    assert_equal(found, reference("llava", Image.open(io.BytesIO(data)))[0])


def test_orientation_of_exif_is_applied(tmp_path: Path) -> None:
    image, exif = noise(40, 30), Image.Exif()
    exif[274] = 6  # to be rotated by 90 degrees clockwise
    found = decode(file_of(image, "PNG", exif=exif.tobytes()))
    assert np.array_equal(np.asarray(found), np.asarray(image.rotate(-90, expand=True)))


def test_extreme_aspect_ratios_are_refused(family: str, folder: Path) -> None:
    """An image of 1 x 60,000 pixels gives an error or a small result, not an image of gigabytes."""
    try:
        found = process(processor_of(folder), Image.new("RGB", (60_000, 1)))
    except MediaError as error:
        assert "aspect ratio" in str(error)
    else:
        assert found.size < 1 << 24


def test_odd_patches_of_lighton_ocr_have_no_token(tmp_path: Path) -> None:
    """Edges are multiples of a patch, and tokens squares of patches."""
    write("lighton_ocr", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 4}))
    processor = processor_of(tmp_path)
    assert arrays(process(processor, noise(30, 21)))["image_sizes"].tolist() == [[24, 32]]
    assert processor.layout(30, 18).runs == (2 * 4,) and processor.layout(28, 29).runs == (4 * 3,)
    with pytest.raises(MediaError, match="smaller than a token"):
        processor.layout(9, 3)


def test_quarters_of_idefics2_equal_transformers(tmp_path: Path) -> None:
    path = write("idefics2", tmp_path) / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"do_image_splitting": True}
    path.write_text(json.dumps(settings))
    theirs = Idefics2Reference(**{key: settings[key] for key in ("size", "do_image_splitting")})
    for size in ((2, 3), (57, 29), (101, 20), (200, 333), (333, 200)):
        image = noise(*size)
        wanted, found = theirs([image], return_tensors="np"), process(processor_of(tmp_path), image)
        assert_equal(found, wanted)
        assert found.text == "<around>" + "<image><around>" * 5 and found.runs == (5,) * 5
    with pytest.raises(MediaError, match="quarters"):
        processor_of(tmp_path).layout(1, 30)


def test_requests_cannot_enlarge_images_of_idefics2_without_limit(tmp_path: Path) -> None:
    """Images have 64 tokens at any size."""
    write("idefics2", tmp_path)
    for edge in (981, 1 << 30):
        with pytest.raises(MediaError, match=f"size has an edge of {edge} pixels; the model has positions for 980"):
            read_processors(tmp_path, {"size": {"shortest_edge": 378, "longest_edge": edge}})
    found = read_processors(tmp_path, {"size": {"shortest_edge": 378, "longest_edge": 980}}).image
    assert found is not None and found.layout(2000, 1000).count == 5


def test_images_of_minicpm_v_are_numbered(tmp_path: Path) -> None:
    """Numbers start from 0 in each prompt and equal those of `MiniCPMV4_6Processor._prepend_local_ids`."""
    path = write("minicpmv4_6", tmp_path) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_image_id": True}))
    processor, texts = processor_of(tmp_path), list[str]()
    image, known = process(processor, noise(24, 24)), {"image": Known(processor.tokens, 1)}

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [1] * text.count("<|image_pad|>")

    expand("<|image_pad|>a<|image_pad|>", [image, image], known, encode)
    own = type("", (), {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"})()
    wanted = MiniCPMV4_6Processor._prepend_local_ids(
        own, ["<|image_pad|>a<|image_pad|>"], [image.text] * 2, "<|image_pad|>"
    )
    assert texts == ["a".join(wanted)]


@pytest.mark.parametrize(
    "settings",
    [{"downsample_mode": "4x"}, {"do_resize": False}, {"max_slice_nums": 0}, {"small_image_upsize": "adaptive"}],
)
def test_other_settings_of_minicpm_v_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    path = write("minicpmv4_6", tmp_path) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        read_processors(tmp_path)


def test_images_of_minicpm_ocr_equal_transformers(tmp_path: Path) -> None:
    settings = {"scale_resolution": 24, "patch_size": 4, "max_slice_nums": 5, "small_image_upsize": "never"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minicpm_ocr"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with imported("transformers.models.minicpm_ocr.image_processing_minicpm_ocr") as module:
        kind = module.MiniCPMOcrImageProcessor
    theirs = kind.__new__(kind)
    theirs.resize = lambda pixels, size, resample: torch.nn.functional.interpolate(
        pixels.unsqueeze(0), (size.height, size.width), mode="bicubic", antialias=True
    )[0]
    theirs.rescale_and_normalize = lambda pixels, *_: (pixels.float() - 127.5) / 127.5
    for size in ((1, 1), (24, 24), (20, 30), (64, 17), (101, 20), (200, 200)):
        image = noise(*size)
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()
        options = {
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "do_resize": True,
        }
        options |= {"image_mean": 0.5, "image_std": 0.5, "slice_mode": True, "disable_grouping": True}
        wanted = theirs._preprocess([pixels], **settings, **options, downsample_mode="4x", return_tensors=None)
        found = arrays(process(processor_of(tmp_path), image))
        np.testing.assert_array_equal(found["target_sizes"], wanted["target_sizes"])
        np.testing.assert_allclose(found["pixel_values"], wanted["pixel_values"], rtol=0, atol=1e-5, err_msg=str(size))


def test_texts_around_images_of_idefics2_equal_transformers(tmp_path: Path) -> None:
    """Adjacent images share a token, and words after an image begin with a space."""

    theirs = Idefics2Processor.__new__(Idefics2Processor)
    theirs.fake_image_token, theirs.image_token, theirs.image_seq_len = "<around>", "<image>", 2
    theirs.image_processor = type("", (), {"do_image_splitting": False})()
    texts = list[str]()
    theirs.tokenizer = lambda given, **_: texts.extend(given) or {}
    theirs.tokenizer.init_kwargs = {}  # type: ignore[attr-defined]
    theirs._merge_kwargs = lambda *_, **__: {"text_kwargs": {}, "images_kwargs": {}}  # type: ignore[method-assign]
    theirs._check_special_mm_tokens = lambda *_, **__: None  # type: ignore[method-assign]
    processor = processor_of(write("idefics2", tmp_path))
    image, known = process(processor, noise(30, 30)), {"image": Known(processor.tokens, 1)}
    own = list[str]()

    def encode(text: str) -> list[int]:
        own.append(text.replace("<image>", "<image>" * 2))
        return [1] * text.count("<image>")

    prompts = ("<image>word", "<image><image> x<image>\ny", "<image><image><image><end>", "a <image>?<image>ä")
    for prompt in prompts:
        theirs(text=prompt)
        expand(prompt, [image] * prompt.count("<image>"), known, encode)
    assert own == texts and len(own) == 4


def test_digest_depends_on_pixels_only(tmp_path: Path) -> None:
    processor = processor_of(write("llava", tmp_path))
    first, again, other = (process(processor, each) for each in (noise(40, 30), noise(40, 30), noise(40, 30, seed=1)))
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 32


class TestPrompt:
    """Placeholders of several images."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> tuple[Processor, Any, Processed, Processed]:
        processor = processor_of(write("gemma3", tmp_path))
        images = [process(processor, noise(40, 30, seed=seed)) for seed in range(2)]
        return processor, own_tokenizer(tmp_path), images[0], images[1]

    def expanded(self, parts: Any, text: str, count: int) -> tuple[list[int], tuple[MediaItem, ...]]:
        processor, tokenizer, *images = parts
        image_id = tokenizer.convert_tokens_to_ids(processor.tokens.image)
        found = expand(text, images[:count], {"image": Known(processor.tokens, image_id)}, tokenizer.encode)
        return found.ids, found.media

    def test_images_keep_their_order(self, parts: Any) -> None:
        ids, media = self.expanded(parts, "a<start_of_image>b<start_of_image>", 2)
        assert [item.digest for item in media] == [parts[2].digest, parts[3].digest]
        assert media[0].spans[-1] < media[1].spans[0] and len(ids) > sum(media[1].spans[-1])

    def test_text_without_images_is_only_tokenized(self, parts: Any) -> None:
        assert self.expanded(parts, "abc", 0) == (parts[1].encode("abc"), ())

    @pytest.mark.parametrize(
        "text,count",
        [
            ("<start_of_image>", 2),
            ("<start_of_image><start_of_image>", 1),
            ("no image", 1),
            ("<start_of_image>", 0),
            ("<start_of_image><image_soft_token>", 1),
            ("<image_soft_token>", 0),
        ],
    )
    def test_a_wrong_number_of_placeholders_is_refused(self, parts: Any, text: str, count: int) -> None:
        with pytest.raises(MediaPromptError):
            self.expanded(parts, text, count)


def test_the_order_of_kinds_in_a_prompt_is_that_of_the_items() -> None:
    """A template that moves videos before images would give an image the tokens of a video."""
    known = {kind: Known(Tokens(f"<{kind}>", f"<{kind}>"), number) for number, kind in enumerate(("image", "video"))}
    items = [Processed(b"1", "<image>", (2,), {}), Processed(b"2", "<video>", (3,), {}, "video", "video")]

    def encode(text: str) -> list[int]:
        return [{"<image>": 0, "<video>": 1}.get(word, 9) for word in text.split()]

    found = expand("a <image> b <video> c", items, known, encode)
    assert found.ids == [9, 0, 0, 9, 1, 1, 1, 9]
    assert [item.spans for item in found.media] == [((1, 2),), ((4, 3),)]
    with pytest.raises(MediaPromptError, match="order"):
        expand("a <video> b <image> c", items, known, encode)


def test_checkpoint_without_image_processor_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert read_processors(tmp_path).image is None
    (tmp_path / "preprocessor_config.json").write_text('{"size": 224}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_processors(tmp_path).image is None


@pytest.mark.parametrize(
    "settings", [{"size": "big"}, {"image_mean": [1, 2]}, {"image_processor_type": "X"}, {"size": {"height": 3}}]
)
def test_invalid_settings_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    write("llava", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match="processor's settings"):
        read_processors(tmp_path)
