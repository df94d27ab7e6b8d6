"""Video processors against transformers': selected frames, tensors, texts with times; and decoding of files."""

import io
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from engine.api.errors import CheckpointError
from engine.media.clip import Clip
from engine.media.families import read_processors
from engine.media.frames import resized_frame
from engine.media.processed import MediaError, Processed
from engine.media.processor import VideoProcessor, process_video
from engine.media.qwen_video import stepped
from engine.media.smolvlm_video import in_words
from engine.media.video import Limits, VideoLimits, _decoded, frame_list, open_video, opened
from tests.engine.media.torchvision_stand_in import imported
from tests.engine.media.video_golden import CASES, GOLDEN, ONEVISION_TOKENS, SMOL_TOKENS, pixels

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN) as file:
        return dict(file)


def processor_of(case: dict[str, Any], folder: Path) -> VideoProcessor:
    settings = {"image_processor_type": "X", **case["settings"]}
    (folder / "config.json").write_text(json.dumps({"model_type": case["type"], "image_seq_length": 4}))
    processor = {"image_seq_len": SMOL_TOKENS, "num_image_tokens": ONEVISION_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokens = {"fake_image_token": "<fake>", "global_image_token": "<global>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    found = read_processors(folder).video
    assert found is not None
    return found


def clip_of(frames: Array, fps: float | None) -> Clip:
    return Clip(len(frames), fps, frames.shape[3], frames.shape[2], lambda chosen: (frames[at] for at in chosen))


def arrays(found: Processed) -> dict[str, Array]:
    return {name: np.frombuffer(one.data, one.dtype).reshape(one.shape) for name, one in found.tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_frames_tensors_and_texts_equal_transformers(name: str, golden: dict[str, Array], tmp_path: Path) -> None:
    case = CASES[name]
    wanted = {key.partition("/")[2]: value for key, value in golden.items() if key.startswith(f"{name}/")}
    processor, clip = processor_of(case, tmp_path), clip_of(pixels(case), case["fps"])
    chosen = clip.chosen(processor.sample)
    assert chosen == wanted["chosen"].tolist()
    found = process_video(processor, clip, 1000)
    own = arrays(found)
    if case["type"] == "internvl":
        np.testing.assert_allclose(own["pixel_values"], wanted["pixel_values_videos"][0], rtol=0, atol=1e-5)
        frames = len(chosen)
        assert found.text == "\n".join(f"Frame{at + 1}: <img><IMG_CONTEXT></img>" for at in range(frames))
        assert found.runs == (4,) * frames and found.modality == "image"
        return
    if "text" in wanted:
        check_text(case["type"], found, own, wanted)
        return
    np.testing.assert_allclose(own["pixel_values_videos"], wanted["pixel_values_videos"], rtol=0, atol=1e-5)
    grid = wanted["video_grid_thw"]
    assert own["video_grid_thw"].tolist() == grid.tolist() and found.modality == "video"
    assert sum(found.runs) == int(grid.prod()) // 4
    if case["type"] == "qwen2_5_vl":
        np.testing.assert_allclose(own["second_per_grid_ts"], [2 / float(wanted["rate"])], rtol=1e-6)
    if case["type"] == "qwen3_vl":
        text = "<{:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>"
        assert found.text == "".join(text.format(each) for each in wanted["times"])
    else:
        assert found.text == "<|video_pad|>" and len(found.runs) == 1


MINICPM = {"scale_resolution": 24, "patch_size": 4, "max_slice_nums": 5, "max_num_frames": 6}


@pytest.mark.parametrize(
    ("frames", "fps", "size"),
    [
        (9, 3.0, (24, 24)),
        (11, 2.0, (8, 8)),
        (12, 2.0, (8, 8)),
        (13, 2.0, (20, 70)),
        (37, 4.3, (64, 17)),
        (200, 2.5, (31, 9)),
        (1, 30.0, (90, 101)),
    ],
)
def test_videos_of_minicpm_v_equal_transformers(frames: int, fps: float, size: tuple[int, int], tmp_path: Path) -> None:
    """A second has a frame, or a long video six; frames are divided into slices."""
    own = {"type": "minicpmv4_6", "settings": MINICPM}
    processor = processor_of(own, tmp_path)
    source = np.random.default_rng(frames).integers(0, 256, (frames, 3, *size), np.uint8)
    clip = clip_of(source, fps)
    with imported("transformers.models.minicpmv4_6.video_processing_minicpmv4_6") as module:
        kind = module.MiniCPMV4_6VideoProcessor
    theirs = kind.__new__(kind)
    metadata = SimpleNamespace(duration=frames / fps, fps=fps, total_num_frames=frames)
    chosen = theirs.sample_frames(metadata, max_num_frames=6, stack_frames=1)
    assert clip.chosen(processor.sample) == chosen
    theirs.resize = lambda pixels, size, resample: torch.nn.functional.interpolate(
        pixels.flatten(0, 1), (size.height, size.width), mode="bicubic", antialias=True
    ).unflatten(0, pixels.shape[:2])
    theirs.rescale_and_normalize = lambda pixels, *_: (pixels.float() - 127.5) / 127.5
    given = {"resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True}
    wanted = theirs._preprocess(
        [torch.from_numpy(source[chosen])],
        **given,
        **MINICPM,
        image_mean=0.5,
        image_std=0.5,
        slice_mode=True,
        stack_frames=1,
        video_metadata=[metadata],
        return_tensors="pt",
    )
    found = process_video(processor, clip, 1000)
    assert found.kind == found.modality == "video"
    np.testing.assert_array_equal(arrays(found)["target_sizes"], wanted["target_sizes_videos"])
    pixel_values = arrays(found)["pixel_values_videos"]
    np.testing.assert_allclose(pixel_values, wanted["pixel_values_videos"], rtol=0, atol=1e-5)
    writer = MiniCPMV4_6Processor.__new__(MiniCPMV4_6Processor)
    for name in ("image_start", "image_end", "slice_start", "slice_end"):
        setattr(writer, f"{name}_token", f"<{'/' if 'end' in name else ''}{name.partition('_')[0]}>")
    writer.video_token, writer.video_slice_mode = "#", True
    text = found.text
    for count in found.runs:
        text = text.replace("<|video_pad|>", "#" * count, 1)
    tables = {name: np.asarray(one) for name, one in wanted.items() if name != "pixel_values_videos"}
    assert text == writer.replace_video_token(tables, 0, video_token_divisor=16)


def test_a_video_of_minicpm_v_with_too_many_slices_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """By default, the longest video with frames of any size is read. More slices are an option of a request."""
    usual = {"max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "max_num_frames": 128}

    def decoded(chosen: Sequence[int]) -> Iterator[Array]:
        yield from ()
        raise MediaError("decoded")

    for more, message in (
        ({}, "decoded"),
        ({"max_slice_nums": 1024}, "128 frames of 3840 x 2160 pixels, which is too"),
    ):
        processor = processor_of({"type": "minicpmv4_6", "settings": usual | more}, tmp_path)
        clip = Clip(4000, 25.0, 3840, 2160, decoded)
        with pytest.raises(MediaError, match=message):
            process_video(processor, clip, 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"stack_frames": 3}, "stack_frames is 3"), ({"max_num_frames": 0}, "max_num_frames is 0")],
)
def test_other_settings_of_videos_of_minicpm_v_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        processor_of({"type": "minicpmv4_6", "settings": MINICPM | settings}, tmp_path)


def check_text(kind: str, found: Processed, own: dict[str, Array], wanted: dict[str, Array]) -> None:
    """Compare a prompt's text, whose media tokens are # in the reference, and the pixels."""
    text, image = (
        found.text,
        {"smolvlm": "<image>", "llava_onevision": "<video>", "gemma4": "<|video|>"}.get(kind, "<|image|>"),
    )
    for count in found.runs:
        text = text.replace(image, "#" * count, 1)
    assert text == str(wanted["text"])
    name = "pixel_values_videos" if kind in ("llava_onevision", "gemma4") else "pixel_values"
    theirs = wanted.get("pixel_values_videos", wanted.get("pixel_values"))
    np.testing.assert_allclose(own[name], theirs, rtol=0, atol=1e-5)
    assert found.modality == ("video" if name == "pixel_values_videos" else "image")
    if kind.startswith("glm"):
        ((frames, high, wide),) = wanted["video_grid_thw"].tolist()
        assert own["image_grid_thw"].tolist() == [[1, high, wide]] * frames
    elif kind == "gemma4":
        assert np.array_equal(own["video_position_ids"], wanted["video_position_ids"])
    elif kind == "smolvlm":
        assert own["pixel_attention_mask"].all() and np.array_equal(
            own["pixel_attention_mask"], wanted["pixel_attention_mask"]
        )


def test_numbers_are_written_in_english() -> None:
    words = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    words |= {101: "one hundred and one", 342: "three hundred and forty-two", 1000: "one thousand"}
    words |= {1001: "one thousand and one", 12_345: "twelve thousand, three hundred and forty-five"}
    assert {count: in_words(count) for count in words} == words


@pytest.mark.parametrize("resample", [1, 2, 3])
def test_resized_frames_equal_torch(resample: int) -> None:
    """Torch's resize is what torchvision calls; equal to the last bit."""
    source = np.random.default_rng(1)
    mode = {1: "lanczos", 2: "bilinear", 3: "bicubic"}[resample]
    for _ in range(25):
        high, wide, rows, columns = (int(each) for each in source.integers(1, 90, 4))
        frame = source.integers(0, 256, (3, high, wide), np.uint8)
        frame = np.where(frame > 127, 255, 0).astype(np.uint8) if high % 2 else frame
        wanted = torch.nn.functional.interpolate(
            torch.from_numpy(frame)[None], (rows, columns), mode=mode, antialias=True
        )
        assert np.array_equal(resized_frame(frame, (rows, columns), resample), wanted[0].numpy())


def test_steps_equal_those_of_torch() -> None:
    for frames in (4, 7, 23, 100, 997, 3600):
        for count in (2, 3, 4, 6, 48, 96):
            if count <= frames:
                assert stepped(frames, count) == torch.arange(0, frames, frames / count).int().tolist()


def test_more_frames_than_the_limit_are_sampled_down(tmp_path: Path) -> None:
    """Evenly, from the frames that the processor selects."""
    case = CASES["qwen2 all"]
    read: list[int] = []

    def decoded(chosen: Sequence[int]) -> Iterator[Array]:
        read.extend(chosen)
        return (np.zeros((3, 8, 8), np.uint8) for _ in chosen)

    process_video(processor_of(case, tmp_path), Clip(3000, 30.0, 8, 8, decoded), 6)
    assert read == [0, 500, 1000, 1500, 2000, 2500]


def test_options_of_a_request_replace_settings(tmp_path: Path) -> None:
    case = CASES["qwen2 rate"]
    processor_of(case, tmp_path)
    found = read_processors(tmp_path, {"num_frames": 4, "max_pixels": 64}).video
    assert found is not None and len(found.sample(23, 10.0)) == 4
    for wrong in (
        {"patch_size": 3},
        {"fps": "x"},
        {"size": 3},
        {"num_frames": 0},
        {"num_frames": 1 << 17},
        {"fps": float("nan")},
    ):
        with pytest.raises(MediaError, match="mm_processor_kwargs"):
            read_processors(tmp_path, wrong)
    assert read_processors(tmp_path, {"size": {"longest_edge": 64}}).video is not None
    with pytest.raises(MediaError, match="shortest_edge and longest_edge"):
        read_processors(tmp_path, {"size": {"height": 8, "width": 8}})


def test_options_do_not_change_the_only_size_that_a_tower_reads(tmp_path: Path) -> None:
    processor_of(next(case for case in CASES.values() if case["type"] == "internvl"), tmp_path)
    with pytest.raises(MediaError, match="reads only one size"):
        read_processors(tmp_path, {"size": {"shortest_edge": 8}})


def test_frames_that_the_server_leaves_out_change_the_times_of_qwen2_5_omni(tmp_path: Path) -> None:
    """The model assumes 2 frames a second; a limit keeps a third of them."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_omni_thinker"}')
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "feature_size": 128}')
    processor, frame = read_processors(tmp_path).video, np.zeros((3, 56, 56), np.uint8)
    clip = Clip(240, 10.0, 56, 56, lambda chosen: (frame for _ in chosen))
    assert processor is not None
    for most, wanted in ((48, 1.0), (16, 3.0)):
        found = process_video(processor, clip, most).tensors
        assert np.frombuffer(found["second_per_grid_ts"].data, "<f4").tolist() == [wanted]
        assert np.frombuffer(found["video_grid_thw"].data, "<i8")[0] == most // 2


def encoded(
    frames: Array, form: str = "mp4", codec: str = "mpeg4", rate: int = 10, sound: Array | None = None
) -> bytes:
    """Return a video file of frames [frames, height, width, 3], with mono samples of int16 at 16 kHz."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        video = container.add_stream(codec, rate=rate)
        video.width, video.height = frames.shape[2], frames.shape[1]
        video.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        if sound is not None:
            track = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
            if len(sound):
                block = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
                block.rate = 16_000
                container.mux([*track.encode(block), *track.encode(None)])
        for number, frame in enumerate(frames):
            one = av.VideoFrame.from_ndarray(frame, format="rgb24")
            one.pts, one.time_base = number, Fraction(1, rate)
            container.mux(video.encode(one))
        container.mux(video.encode())
    return stream.getvalue()


def steps(count: int = 20, high: int = 32, wide: int = 48) -> Array:
    """Return grey frames, each brighter than the one before."""
    levels = np.linspace(10, 240, count).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, high, wide, 3)).copy()


@pytest.mark.parametrize(
    "form,codec", [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg"), ("webm", "libvpx"), ("gif", "gif")]
)
def test_files_of_any_container_are_decoded(form: str, codec: str) -> None:
    """Frames equal PyAV's, also if the container does not announce their number."""
    data = encoded(steps(), form, codec)
    with av.open(io.BytesIO(data)) as container:
        wanted = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with open_video(data) as clip:
        assert (clip.frames, clip.width, clip.height) == (20, 48, 32) and clip.fps is not None
        assert clip.fps == pytest.approx(10.0)
        chosen = [0, 7, 7, 19]
        found = list(clip.read(chosen))
    assert len(found) == 4
    for number, frame in zip(chosen, found, strict=True):
        assert np.array_equal(frame, np.moveaxis(wanted[number], -1, 0))


DEFAULT = VideoLimits()


def refused(data: bytes, limits: VideoLimits = DEFAULT) -> str:
    with pytest.raises(MediaError) as caught, open_video(data, limits) as clip:
        list(clip.read([0, clip.frames - 1]))
    return str(caught.value)


def test_limits_of_pixels_seconds_and_bytes() -> None:
    data = encoded(steps())
    assert "limit is 1,000 pixels of a frame" in refused(data, VideoLimits(image=Limits(max_pixels=1000)))
    assert "duration of 2.0 s; the limit is 1.5 s" in refused(data, VideoLimits(seconds=1.5))
    assert "bytes; the limit is 100" in refused(data, VideoLimits(image=Limits(max_bytes=100)))


def test_damaged_and_truncated_files_are_refused() -> None:
    data = encoded(np.random.default_rng(0).integers(0, 256, (20, 32, 48, 3), np.uint8), "avi", "mjpeg")
    assert refused(data[: len(data) // 2])
    for wrong in (b"", b"\0" * 100, b"RIFF", data[:40], Path(__file__).read_bytes()):
        assert refused(wrong)


def test_files_with_an_unknown_codec_are_refused() -> None:
    data = encoded(steps(), "matroska").replace(b"V_MPEG4/ISO/ASP", b"V_UNKNOWN/CODEC")
    assert "codec of the video is not supported" in refused(data)


def test_missing_frames_at_the_end() -> None:
    """One may be missing, as in files with edit lists, and the last one replaces it; more are a damaged file."""
    with opened(encoded(steps())) as container:
        found = list(_decoded(container, [0, 19, 20], (48, 32), 21))
    assert len(found) == 3 and np.array_equal(found[1], found[2])
    with pytest.raises(MediaError, match="ends after 20 of 40 frames"), opened(encoded(steps())) as container:
        list(_decoded(container, [0, 39], (48, 32), 40))


def test_playlists_do_not_open_other_files(tmp_path: Path) -> None:
    """Formats that name further files are not opened."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(encoded(steps()))
    playlists = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
        f"<?xml version='1.0'?><MPD><Period><BaseURL>file://{secret}</BaseURL></Period></MPD>",
    )
    for text in playlists:
        assert "known format" in refused(text.encode())


def test_lists_of_frames_have_one_size_and_a_limit() -> None:
    def file(size: tuple[int, int]) -> bytes:
        stream = io.BytesIO()
        Image.new("RGB", size, (9, 8, 7)).save(stream, "PNG")
        return stream.getvalue()

    clip = frame_list([file((6, 4))] * 3)
    assert (clip.frames, clip.fps, clip.width, clip.height) == (3, None, 6, 4)
    assert [frame.shape for frame in clip.read([0, 1, 2])] == [(3, 4, 6)] * 3
    with pytest.raises(MediaError, match="several sizes"):
        frame_list([file((6, 4)), file((4, 6))])
    with pytest.raises(MediaError, match="limit is 2"):
        frame_list([file((6, 4))] * 3, VideoLimits(frames=2))


IDENTITY = b"".join(value.to_bytes(4, "big") for value in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))


def turned(data: bytes, quarters: int) -> bytes:
    """Return an MP4 file whose track has the matrix of this many quarter turns, clockwise."""
    a, b = {0: (1, 0), 1: (0, 1), 2: (-1, 0), 3: (0, -1)}[quarters]
    values = [value << 16 for value in (a, b, 0, -b, a, 0, 0, 0)]
    matrix = b"".join((value % (1 << 32)).to_bytes(4, "big") for value in values) + (1 << 30).to_bytes(4, "big")
    at = data.index(IDENTITY, data.index(b"tkhd"))
    return data[:at] + matrix + data[at + len(matrix) :]


@pytest.mark.parametrize("quarters", range(4))
def test_the_rotation_of_a_file_is_applied(quarters: int) -> None:
    """Frames are rotated clockwise by the angle in the file, as players rotate them."""
    frames = steps(4, 32, 48).copy()
    images = np.moveaxis(frames, 1, -1) if frames.shape[1] == 3 else frames
    images[:, :8, :24] = 255
    data = encoded(frames)
    with open_video(data) as plain:
        stored = list(plain.read([0, 2]))
    assert not np.array_equal(stored[0], np.rot90(stored[0], 2, (1, 2)))
    with open_video(turned(data, quarters)) as clip:
        assert (clip.width, clip.height) == ((48, 32) if quarters % 2 == 0 else (32, 48))
        for found, before in zip(clip.read([0, 2]), stored, strict=True):
            np.testing.assert_array_equal(found, np.rot90(before, -quarters, (1, 2)))
